//! The payload file: a valid safetensors file whose data section starts at a multiple of 4096 and
//! whose `__metadata__` carries the checksums of 1 MiB blocks.

mod dtype;
mod header;
mod json;
mod layout;
mod stream;
mod text;

pub use dtype::DType;
pub use header::{HEADER_LIMIT, Header, TensorInfo};
pub use layout::{Layout, TensorSpec};
pub use stream::{FILLER, HEADER_AREA, Placement, Stream, TENSOR_ALIGN};

use std::hash::Hasher;

use twox_hash::XxHash3_64;

/// A tensor's bytes are checksummed in blocks of this size, counted from the tensor's first byte.
pub const BLOCK: u64 = 1 << 20;

/// The data section starts at a multiple of this.
pub const ALIGN: u64 = 4096;

/// Bytes are hashed in pieces of at most this size, while they are hot in the cache.
pub const PIECE: usize = 512 << 10;

/// XXH3-64.
pub fn xxh3(data: &[u8]) -> u64 {
    XxHash3_64::oneshot(data)
}

/// XXH3-64 as 16 hex digits.
pub fn xxh3_hex(data: &[u8]) -> String {
    hex16(xxh3(data))
}

/// A hash as 16 hex digits.
pub fn hex16(hash: u64) -> String {
    format!("{hash:016x}")
}

/// Checksums of a tensor whose bytes arrive in order, in pieces of any size.
pub struct BlockHasher {
    hasher: XxHash3_64,
    room: u64,
    text: String,
}

impl BlockHasher {
    /// A hasher that has seen nothing.
    pub fn new() -> Self {
        Self {
            hasher: XxHash3_64::new(),
            room: BLOCK,
            text: String::new(),
        }
    }

    /// Takes the next bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let take = usize::try_from(self.room).map_or(bytes.len(), |room| room.min(bytes.len()));
            let (now, later) = bytes.split_at(take);
            self.hasher.write(now);
            self.room -= take as u64;
            if self.room == 0 {
                self.close_block();
            }
            bytes = later;
        }
    }

    /// The list: 16 hex digits per block, concatenated; nothing for no bytes.
    pub fn finish(mut self) -> String {
        if self.room < BLOCK {
            self.close_block();
        }
        self.text
    }

    fn close_block(&mut self) {
        self.text.push_str(&hex16(self.hasher.finish()));
        self.hasher = XxHash3_64::new();
        self.room = BLOCK;
    }
}

impl Default for BlockHasher {
    fn default() -> Self {
        Self::new()
    }
}

/// The checksum of a segment: XXH3-64 of the concatenated list of its tensor's blocks.
pub fn segment_checksum(blocks: &str) -> String {
    xxh3_hex(blocks.as_bytes())
}

/// How many checksum blocks `len` bytes have.
pub fn block_count(len: u64) -> u64 {
    len.div_ceil(BLOCK)
}

#[cfg(test)]
mod tests;
