//! A payload file that grows: tensors one after the other, behind a header area of fixed size.

use super::dtype::DType;
use super::header::HEADER_LIMIT;
use super::layout::TensorSpec;
use super::text::Text;
use super::{ALIGN, block_count};
use crate::{Error, Result};

/// The data section of a streamed file starts here, unless its first append alone needs more room.
pub const HEADER_AREA: u64 = 64 << 10;

/// The tensors of a streamed file start at multiples of this; those without bytes anywhere.
pub const TENSOR_ALIGN: u64 = 64;

/// The names of what fills the gaps, which the format forbids: `__pad__<n>`. No field has one of
/// these, as theirs end in `.<n>`.
pub const FILLER: &str = "__pad__";

impl Placement {
    /// Bytes of tensor `index`.
    pub fn len(&self, index: usize) -> u64 {
        let (_, start, end) = self.spots[index];
        end - start
    }
}

/// What a streamed file holds so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stream {
    text: Text,
    data_start: u64,
    /// Bytes of the data section.
    len: u64,
    fillers: u64,
    empty: bool,
}

/// Where the tensors of one append go, in the stream that was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// (start of the filler before it, start, end) of each tensor, within the data section.
    spots: Vec<(u64, u64, u64)>,
    len: u64,
    /// Bytes that the header grows by.
    text: u64,
}

impl Stream {
    /// A file without tensors.
    pub fn new(version: u64) -> Self {
        Self {
            text: Text::new(version),
            data_start: HEADER_AREA,
            len: 0,
            fillers: 0,
            empty: true,
        }
    }

    /// Where the next tensors would go.
    pub fn place(&self, tensors: &[TensorSpec]) -> Result<Placement> {
        let mut spots = Vec::with_capacity(tensors.len());
        let mut at = self.len;
        let mut lists = 0_u64;
        for tensor in tensors {
            let wrong = |why: &str| Error::invalid("append", &tensor.name, why);
            let len = tensor
                .dtype
                .tensor_bytes(&tensor.shape)
                .ok_or_else(|| wrong("the shape overflows or ends within a byte"))?;
            let start = if len == 0 {
                at
            } else {
                at.next_multiple_of(TENSOR_ALIGN)
            };
            let end = start.checked_add(len);
            let end = end.filter(|end| i64::try_from(end.saturating_add(HEADER_LIMIT)).is_ok());
            let end =
                end.ok_or_else(|| wrong("the file would be larger than any filesystem allows"))?;
            lists += 16 * block_count(len);
            if lists > HEADER_LIMIT {
                return Err(wrong("its checksums would not fit a header"));
            }
            spots.push((at, start, end));
            at = end;
        }
        let none = vec![String::new(); tensors.len()];
        let text = self.part(&spots, tensors, &none).len() + lists;
        Ok(Placement {
            spots,
            len: at,
            text,
        })
    }

    /// Whether the header has room for them. That of a file without tensors is given as much as it
    /// takes, up to the limit of the format.
    pub fn make_room(&mut self, placement: &Placement) -> bool {
        let need = self.text.json_len() + placement.text + 8;
        if self.empty && need <= HEADER_LIMIT {
            self.data_start = need.next_multiple_of(ALIGN).max(HEADER_AREA);
        }
        need <= self.data_start
    }

    /// Where tensor `index` of a placement starts, from byte 0 of the file.
    pub fn offset(&self, placement: &Placement, index: usize) -> u64 {
        self.data_start + placement.spots[index].1
    }

    /// Takes the tensors up, with their block lists.
    pub fn add(&mut self, placement: &Placement, tensors: &[TensorSpec], lists: &[String]) {
        let part = self.part(&placement.spots, tensors, lists);
        self.text.extend(&part);
        self.fillers += fillers(&placement.spots).count() as u64;
        self.len = placement.len;
        self.empty = false;
    }

    /// Everything before the data section.
    pub fn header(&self) -> Vec<u8> {
        self.text.bytes(self.data_start)
    }

    fn part(&self, spots: &[(u64, u64, u64)], tensors: &[TensorSpec], lists: &[String]) -> Text {
        let mut part = Text::default();
        for (number, (gap, start)) in (self.fillers..).zip(fillers(spots)) {
            let name = format!("{FILLER}{number}");
            part.tensor(&name, DType::U8, &[start - gap], (gap, start));
        }
        for ((tensor, list), (_, start, end)) in tensors.iter().zip(lists).zip(spots) {
            part.blocks(&tensor.name, list);
            part.tensor(&tensor.name, tensor.dtype, &tensor.shape, (*start, *end));
        }
        part
    }
}

/// The gaps before tensors.
fn fillers(spots: &[(u64, u64, u64)]) -> impl Iterator<Item = (u64, u64)> {
    let gaps = spots.iter().map(|(gap, start, _)| (*gap, *start));
    gaps.filter(|(gap, start)| gap < start)
}
