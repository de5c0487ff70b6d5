//! Reads exactly the wanted bytes, and checks them on the way.

use std::hash::Hasher;

use twox_hash::XxHash3_64;

use crate::error::{Context, Error, Result};
use crate::format::{BLOCK, PIECE, TensorInfo, hex16, xxh3};
use crate::fs::Fs;

/// One `read` moves at most this much on Linux.
const MOST: usize = 0x7fff_f000;

/// What is hashed at once, right after it was read: source and destination stay in a core's own cache.
const HOT: usize = PIECE / 4;

/// An open file and its name for messages.
pub(super) struct Reader<'a, F: Fs> {
    pub(super) fs: &'a F,
    pub(super) file: &'a F::File,
    pub(super) name: &'a str,
}

/// A tensor and the checksums of its blocks: 16 hex digits for each [`BLOCK`] bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Check<'a> {
    pub(super) tensor: &'a TensorInfo,
    pub(super) blocks: &'a str,
}

impl Check<'_> {
    /// Whether bytes that start and end where blocks do, from byte `at` of the file on, are what was written.
    pub(super) fn matches(&self, file: &str, bytes: &[u8], at: u64) -> Result<()> {
        let first = (at - self.tensor.offset) / BLOCK;
        let size = usize::try_from(BLOCK).unwrap_or(usize::MAX);
        for (block, bytes) in (first..).zip(bytes.chunks(size)) {
            self.is(file, block, xxh3(bytes))?;
        }
        Ok(())
    }

    fn is(&self, file: &str, block: u64, hash: u64) -> Result<()> {
        let digits = usize::try_from(block * 16).unwrap_or(usize::MAX);
        let known = self.blocks.get(digits..digits.saturating_add(16));
        if known == Some(hex16(hash).as_str()) {
            return Ok(());
        }
        let (name, from) = (&self.tensor.name, self.tensor.offset + block * BLOCK);
        let end = (from + BLOCK).min(self.tensor.offset + self.tensor.len);
        let why = format!("tensor {name:?} differs from its checksum in bytes {from}..{end}");
        Err(Error::corrupt("verify", file, why))
    }
}

impl<F: Fs> Reader<'_, F> {
    /// Fills `buf` from `offset` on. Short reads go on; the end of the file before the end of `buf` is
    /// corruption, because the size was right when the file was opened.
    pub(super) fn exact(&self, mut buf: &mut [u8], mut offset: u64) -> Result<()> {
        while !buf.is_empty() {
            let most = buf.len().min(MOST);
            let got = self
                .fs
                .read_at(self.file, &mut buf[..most], offset)
                .context("gather", self.name)?;
            if got == 0 {
                let why = format!("the file ended at byte {offset} while it was read");
                return Err(Error::corrupt("gather", self.name, why));
            }
            offset += got as u64;
            buf = &mut buf[got..];
        }
        Ok(())
    }

    /// Fills `buf` from `offset` on, which lies in the tensor, and checks every block that it touches:
    /// the rest of the first and the last block is read into `scratch`.
    pub(super) fn verified(
        &self,
        buf: &mut [u8],
        offset: u64,
        check: Check<'_>,
        scratch: &mut Vec<u8>,
    ) -> Result<()> {
        let tensor = check.tensor;
        let (mut rest, mut at) = (buf, offset);
        while !rest.is_empty() {
            let block = (at - tensor.offset) / BLOCK;
            let from = tensor.offset + block * BLOCK;
            let to = (from + BLOCK).min(tensor.offset + tensor.len);
            let inside = usize::try_from(to - at).map_or(rest.len(), |left| left.min(rest.len()));
            assert!(inside > 0, "the rows lie in the tensor");
            let (now, later) = rest.split_at_mut(inside);
            let mut hasher = XxHash3_64::new();
            self.hash(&mut hasher, from, at, scratch)?;
            for piece in now.chunks_mut(HOT) {
                self.exact(piece, at)?;
                hasher.write(piece);
                at += piece.len() as u64;
            }
            self.hash(&mut hasher, at, to, scratch)?;
            check.is(self.name, block, hasher.finish())?;
            rest = later;
        }
        Ok(())
    }

    /// Hashes bytes `from..to` that nobody wants.
    fn hash(
        &self,
        hasher: &mut XxHash3_64,
        from: u64,
        to: u64,
        scratch: &mut Vec<u8>,
    ) -> Result<()> {
        let mut at = from;
        while at < to {
            let most = usize::try_from(to - at).map_or(PIECE, |left| left.min(PIECE));
            if scratch.len() < most {
                scratch.resize(most, 0);
            }
            self.exact(&mut scratch[..most], at)?;
            hasher.write(&scratch[..most]);
            at += most as u64;
        }
        Ok(())
    }
}
