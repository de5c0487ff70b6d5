//! Reading a safetensors header that nobody vouches for.

use std::collections::{BTreeMap, HashSet};
use std::result::Result as StdResult;

use super::dtype::DType;
use super::json::RawHeader;
use super::{block_count, segment_checksum};
use crate::error::Context;
use crate::fs::Fs;
use crate::{Error, Result};

/// The longest header that is read, as in the reference implementation.
pub const HEADER_LIMIT: u64 = 100_000_000;

pub(super) const META_KEY: &str = "__metadata__";
pub(super) const FORMAT_KEY: &str = "prime_io";
pub(super) const VERSION_KEY: &str = "policy_version";

/// The metadata key of a tensor's block list.
pub(super) fn checksum_key(name: &str) -> String {
    format!("xxh3:{name}")
}

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Its full shape.
    pub shape: Vec<u64>,
    /// Where it starts, from byte 0 of the file.
    pub offset: u64,
    /// Its bytes.
    pub len: u64,
}

/// A checked header: every tensor lies within the file, none overlap, no hole is left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Bytes of the whole file.
    pub size: u64,
    /// Where the data section starts.
    pub data_start: u64,
    /// The tensors by offset.
    pub tensors: Vec<TensorInfo>,
    /// The `__metadata__`.
    pub metadata: BTreeMap<String, String>,
}

impl Header {
    /// Reads and checks the header of an open file. `path` is for messages.
    pub fn read<F: Fs>(fs: &F, file: &F::File, path: &str) -> Result<Self> {
        let size = fs.stat_file(file).context("header", path)?.size;
        let mut first = vec![0; usize::try_from(size.min(4096)).expect("at most 4096")];
        read_exact(fs, file, &mut first, 0, path)?;
        let length = header_length(&first, size).map_err(|why| corrupt(path, why))?;
        let length = usize::try_from(length).expect("bounded by HEADER_LIMIT");
        first.drain(..8);
        let have = first.len().min(length);
        first.resize(length, 0);
        read_exact(fs, file, &mut first[have..], have as u64 + 8, path)?;
        Self::check(&first, size).map_err(|why| corrupt(path, why))
    }

    /// Checks the first bytes of a file of `size` bytes; `bytes` must hold the whole header.
    pub fn parse(bytes: &[u8], size: u64, path: &str) -> Result<Self> {
        let length = header_length(bytes, size).map_err(|why| corrupt(path, why))?;
        let end = usize::try_from(length + 8).expect("bounded by HEADER_LIMIT");
        let json = bytes
            .get(8..end)
            .ok_or_else(|| corrupt(path, "the header is cut short"))?;
        Self::check(json, size).map_err(|why| corrupt(path, why))
    }

    /// The tensor that holds byte `offset` of the file; for an empty tensor, the one starting there.
    pub fn tensor_at(&self, offset: u64) -> Option<&TensorInfo> {
        let after = self
            .tensors
            .partition_point(|tensor| tensor.offset <= offset);
        let tensor = self.tensors[..after].last()?;
        (offset - tensor.offset < tensor.len || offset == tensor.offset).then_some(tensor)
    }

    /// The block list of a tensor: 16 hex digits per 1 MiB; none if the file carries none.
    pub fn blocks(&self, name: &str) -> Option<&str> {
        self.metadata.get(&checksum_key(name)).map(String::as_str)
    }

    /// The segment checksum of a tensor; "" if the file carries none.
    pub fn checksum(&self, name: &str) -> String {
        self.blocks(name).map_or_else(String::new, segment_checksum)
    }

    /// Whether all of these segment checksums belong to tensors of the file.
    pub fn holds(&self, checksums: &[String]) -> bool {
        let own: HashSet<String> = self
            .tensors
            .iter()
            .map(|tensor| self.checksum(&tensor.name))
            .collect();
        checksums
            .iter()
            .all(|checksum| checksum.is_empty() || own.contains(checksum))
    }

    fn check(json: &[u8], size: u64) -> StdResult<Self, String> {
        if json.first() != Some(&b'{') {
            return Err("not a safetensors file: the header is no JSON object".into());
        }
        let raw: RawHeader =
            serde_json::from_slice(json).map_err(|why| format!("header: {why}"))?;
        let data_start = json.len() as u64 + 8;
        let mut tensors = Vec::with_capacity(raw.tensors.len());
        for (name, raw) in raw.tensors {
            let dtype = DType::from_name(&raw.dtype)
                .ok_or_else(|| format!("tensor {name:?} has the unknown dtype {:?}", raw.dtype))?;
            let (start, end) = raw.data_offsets;
            let len = dtype
                .tensor_bytes(&raw.shape)
                .ok_or_else(|| format!("the shape of tensor {name:?} overflows"))?;
            if start.checked_add(len) != Some(end) {
                return Err(format!(
                    "the offsets of tensor {name:?} do not fit its shape"
                ));
            }
            let offset = data_start
                .checked_add(start)
                .filter(|_| end <= size - data_start)
                .ok_or_else(|| format!("tensor {name:?} lies beyond the end of the file"))?;
            tensors.push(TensorInfo {
                name,
                dtype,
                shape: raw.shape,
                offset,
                len,
            });
        }
        tensors.sort_by_key(|tensor| (tensor.offset, tensor.len));
        let mut at = data_start;
        for tensor in &tensors {
            if tensor.offset != at {
                return Err(format!(
                    "there is a hole or an overlap before tensor {:?}",
                    tensor.name
                ));
            }
            at += tensor.len;
        }
        if at != size {
            return Err(format!(
                "the file has {size} bytes where its header says {at}"
            ));
        }
        for tensor in &tensors {
            if let Some(list) = raw.metadata.get(&checksum_key(&tensor.name)) {
                let hex = list.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
                if !hex || list.len() as u64 != 16 * block_count(tensor.len) {
                    return Err(format!(
                        "the checksums of tensor {:?} are malformed",
                        tensor.name
                    ));
                }
            }
        }
        Ok(Self {
            size,
            data_start,
            tensors,
            metadata: raw.metadata,
        })
    }
}

fn corrupt(path: &str, why: impl Into<String>) -> Error {
    Error::corrupt("header", path, why)
}

/// The length of the JSON text, believed only as far as the file backs it.
fn header_length(bytes: &[u8], size: u64) -> StdResult<u64, &'static str> {
    let Some(length) = bytes.first_chunk::<8>() else {
        return Err("not a safetensors file: shorter than 8 bytes");
    };
    let length = u64::from_le_bytes(*length);
    if length > HEADER_LIMIT {
        return Err("not a safetensors file, or its header has more than 100,000,000 bytes");
    }
    if size < 8 || length > size - 8 {
        return Err("the header is longer than the file");
    }
    Ok(length)
}

fn read_exact<F: Fs>(fs: &F, file: &F::File, buf: &mut [u8], at: u64, path: &str) -> Result<()> {
    let mut done = 0;
    while done < buf.len() {
        match fs
            .read_at(file, &mut buf[done..], at + done as u64)
            .context("header", path)?
        {
            0 => return Err(corrupt(path, "the file was cut short while it was read")),
            n => done += n,
        }
    }
    Ok(())
}
