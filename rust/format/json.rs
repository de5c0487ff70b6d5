//! The JSON of a header. A key that is there twice means different things to different readers, so
//! it is an error.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use super::header::META_KEY;

/// A tensor as the file claims it.
#[derive(Deserialize)]
pub(super) struct RawTensor {
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    pub(super) data_offsets: (u64, u64),
}

/// The header as the file claims it; no key is there twice.
#[derive(Default)]
pub(super) struct RawHeader {
    pub(super) tensors: Vec<(String, RawTensor)>,
    pub(super) metadata: BTreeMap<String, String>,
}

/// A string map in which no key may be there twice.
struct RawMetadata(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader::default();
                let mut seen = HashSet::new();
                while let Some(key) = map.next_key::<String>()? {
                    if !seen.insert(key.clone()) {
                        return Err(A::Error::custom(format!("the key {key:?} is there twice")));
                    }
                    if key == META_KEY {
                        header.metadata = map.next_value::<RawMetadata>()?.0;
                    } else {
                        header.tensors.push((key, map.next_value()?));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Keys)
    }
}

impl<'de> Deserialize<'de> for RawMetadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = RawMetadata;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawMetadata, A::Error> {
                let mut pairs = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if pairs.contains_key(&key) {
                        return Err(A::Error::custom(format!("the key {key:?} is there twice")));
                    }
                    pairs.insert(key, value);
                }
                Ok(RawMetadata(pairs))
            }
        }
        deserializer.deserialize_map(Keys)
    }
}
