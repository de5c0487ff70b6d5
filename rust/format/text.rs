//! The JSON text of a header that is being written.

use super::dtype::DType;
use super::header::{FORMAT_KEY, META_KEY, VERSION_KEY, checksum_key};

/// The two parts of a header's text that grow with its tensors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Text {
    meta: String,
    entries: String,
}

impl Text {
    /// The header of a file without tensors.
    pub(super) fn new(version: u64) -> Self {
        let (format, policy) = (quote(FORMAT_KEY), quote(VERSION_KEY));
        Self {
            meta: format!("{format}:\"1\",{policy}:\"{version}\""),
            entries: String::new(),
        }
    }

    /// Adds the entry of a tensor at bytes `start..end` of the data section.
    pub(super) fn tensor(&mut self, name: &str, dtype: DType, shape: &[u64], at: (u64, u64)) {
        let shape: Vec<_> = shape.iter().map(ToString::to_string).collect();
        let (name, dtype, shape) = (quote(name), dtype.name(), shape.join(","));
        let (start, end) = at;
        let entry = format!(
            ",{name}:{{\"dtype\":\"{dtype}\",\"shape\":[{shape}],\"data_offsets\":[{start},{end}]}}"
        );
        self.entries.push_str(&entry);
    }

    /// Adds the block list of a tensor.
    pub(super) fn blocks(&mut self, name: &str, list: &str) {
        let key = quote(&checksum_key(name));
        self.meta.extend([",", &key, ":\"", list, "\""]);
    }

    /// Adds what another text has.
    pub(super) fn extend(&mut self, other: &Self) {
        self.meta.push_str(&other.meta);
        self.entries.push_str(&other.entries);
    }

    /// Bytes of what grows.
    pub(super) fn len(&self) -> u64 {
        (self.meta.len() + self.entries.len()) as u64
    }

    /// Bytes of the whole JSON.
    pub(super) fn json_len(&self) -> u64 {
        self.len() + (META_KEY.len() + "{\"\":{}}".len()) as u64
    }

    /// Everything before the data section, which starts at `data_start`.
    pub(super) fn bytes(&self, data_start: u64) -> Vec<u8> {
        let size = usize::try_from(data_start).expect("bounded by HEADER_LIMIT");
        let mut bytes = Vec::with_capacity(size);
        bytes.extend_from_slice(&(data_start - 8).to_le_bytes());
        for part in ["{\"", META_KEY, "\":{", &self.meta, "}", &self.entries, "}"] {
            bytes.extend_from_slice(part.as_bytes());
        }
        assert!(bytes.len() <= size, "the header was given too little room");
        bytes.resize(size, b' ');
        bytes
    }
}

fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
