//! Where the tensors of a new payload file go, and its header.

use super::dtype::DType;
use super::header::{HEADER_LIMIT, META_KEY};
use super::text::Text;
use super::{ALIGN, block_count};
use crate::{Error, Result};

/// A tensor about to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name, unique in the file.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Its full shape.
    pub shape: Vec<u64>,
}

/// The plan of a payload file: a function of version and tensors alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    version: u64,
    tensors: Vec<TensorSpec>,
    lens: Vec<u64>,
    order: Vec<usize>,
    offsets: Vec<u64>,
    data_start: u64,
    size: u64,
}

impl Layout {
    /// Places the tensors: widest elements first, then by name, without holes.
    pub fn plan(version: u64, tensors: Vec<TensorSpec>) -> Result<Self> {
        let wrong = |name: &str, why: &str| Err(Error::invalid("publish", name, why));
        let mut lens = Vec::with_capacity(tensors.len());
        let mut total = 0_u64;
        let mut lists = 0_u64;
        for tensor in &tensors {
            if tensor.name.is_empty() || tensor.name == META_KEY {
                return wrong(&tensor.name, "a field needs a name other than __metadata__");
            }
            let Some(len) = tensor.dtype.tensor_bytes(&tensor.shape) else {
                return wrong(&tensor.name, "the shape overflows or ends within a byte");
            };
            let sum = total
                .checked_add(len)
                .filter(|sum| i64::try_from(*sum).is_ok());
            let Some(sum) = sum else {
                return wrong(
                    &tensor.name,
                    "the file would be larger than any filesystem allows",
                );
            };
            total = sum;
            lists += 16 * block_count(len);
            if lists > HEADER_LIMIT {
                return wrong(&tensor.name, "its checksums would not fit a header");
            }
            lens.push(len);
        }
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by(|&a, &b| {
            let (a, b) = (&tensors[a], &tensors[b]);
            b.dtype
                .bits()
                .cmp(&a.dtype.bits())
                .then_with(|| a.name.cmp(&b.name))
        });
        let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return wrong(twice[0], "the field is there twice");
        }
        let mut plan = Self {
            version,
            offsets: vec![0; lens.len()],
            lens,
            order,
            tensors,
            data_start: 0,
            size: 0,
        };
        let text = plan.text(|_| String::new());
        plan.data_start = (text.json_len() + lists + 8).next_multiple_of(ALIGN);
        if plan.data_start - 8 > HEADER_LIMIT {
            return wrong("", "the header would have more than 100,000,000 bytes");
        }
        let mut at = plan.data_start;
        for &index in &plan.order {
            plan.offsets[index] = at;
            at += plan.lens[index];
        }
        plan.size = at;
        Ok(plan)
    }

    /// Indices of the tensors in the order of their bytes.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Where tensor `index` (of the caller's order) starts, from byte 0 of the file.
    pub fn offset(&self, index: usize) -> u64 {
        self.offsets[index]
    }

    /// Bytes of tensor `index`.
    pub fn len(&self, index: usize) -> u64 {
        self.lens[index]
    }

    /// The tensors in the caller's order.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// Where the data section starts; also the length of [`Layout::header`].
    pub fn data_start(&self) -> u64 {
        self.data_start
    }

    /// Bytes of the whole file.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Everything before the data section; `checksums[i]` is the block list of tensor `i`.
    pub fn header(&self, checksums: &[String]) -> Vec<u8> {
        self.text(|index| checksums[index].clone())
            .bytes(self.data_start)
    }

    /// The text, whose offsets are relative to the data section and do not depend on it.
    fn text(&self, list: impl Fn(usize) -> String) -> Text {
        let mut text = Text::new(self.version);
        let mut at = 0;
        for &index in &self.order {
            let (tensor, len) = (&self.tensors[index], self.lens[index]);
            text.blocks(&tensor.name, &list(index));
            text.tensor(&tensor.name, tensor.dtype, &tensor.shape, (at, at + len));
            at += len;
        }
        text
    }
}
