//! From what segments claim to disjoint pieces of rows. Pure: all arithmetic is checked here, once.

use std::collections::BinaryHeap;
use std::ops::Range;

use super::convert::{convertible, spread_unit};
use super::{Fill, Request};
use crate::error::{Error, Result};
use crate::format::DType;

/// A request that can be served if its files are as large as `needs` says.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) rows: usize,
    pub(super) row_bytes: usize,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    /// Repeated, it is what goes where no segment has a value; divides `row_bytes`.
    pub(super) unit: Vec<u8>,
    /// Ascending, disjoint, and all of `0..rows` together.
    pub(super) pieces: Vec<Piece>,
    /// The segments that some piece reads.
    pub(super) needs: Vec<Need>,
}

/// A segment that is read.
#[derive(Debug)]
pub(super) struct Need {
    pub(super) file: String,
    /// The first byte of the segment.
    pub(super) start: u64,
    /// One past the last byte of the segment.
    pub(super) end: u64,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    /// Bytes of a stored row; not 0.
    pub(super) row_bytes: usize,
    /// "" unless it is to be verified.
    pub(super) checksum: String,
    /// Its index in the request, for messages.
    pub(super) index: usize,
}

/// Consecutive rows of the destination with one source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) rows: Range<usize>,
    pub(super) covered: bool,
    /// The index in `Plan::needs` and the first byte in the file; none where there is nothing to read.
    pub(super) from: Option<(usize, u64)>,
}

/// `(rows, row bytes)`, whose product fits.
pub(super) fn sizes(lo: u64, hi: u64, dtype: DType, shape: &[u64]) -> Result<(usize, usize)> {
    let wrong = |why: String| Error::invalid("gather", "", why);
    let rows = hi
        .checked_sub(lo)
        .ok_or_else(|| wrong(format!("hi = {hi} is less than lo = {lo}")))?;
    if dtype.item_size().is_none() {
        return Err(wrong(format!(
            "{} has a fraction of a byte per item",
            dtype.name()
        )));
    }
    let large = || {
        wrong(format!(
            "{rows} rows of shape {shape:?} are larger than memory"
        ))
    };
    let row_bytes = dtype.tensor_bytes(shape).ok_or_else(large)?;
    let total = rows.checked_mul(row_bytes).ok_or_else(large)?;
    if isize::try_from(total.max(rows).max(row_bytes)).is_err() {
        return Err(large());
    }
    Ok((
        usize::try_from(rows).map_err(|_| large())?,
        usize::try_from(row_bytes).map_err(|_| large())?,
    ))
}

/// Checks a request; `lens` are the lengths of the destinations that it brought.
pub(super) fn check(
    request: Request<'_>,
    lens: (Option<usize>, Option<usize>),
    verify: bool,
) -> Result<Plan> {
    let Request {
        segments,
        lo,
        hi,
        dtype,
        shape,
        fill,
        ..
    } = request;
    let (rows, row_bytes) = sizes(lo, hi, dtype, &shape)?;
    for (name, have, want) in [("out", lens.0, rows * row_bytes), ("valid", lens.1, rows)] {
        if let Some(have) = have.filter(|&have| have != want) {
            let why = format!("{name} has {have} bytes, but {want} are to be written");
            return Err(Error::invalid("gather", "", why));
        }
    }
    let dims = |dims: &[u64]| -> Vec<usize> {
        // A dimension beyond usize belongs to a shape of no bytes: its size is never used.
        dims.iter()
            .map(|&dim| usize::try_from(dim).unwrap_or(usize::MAX))
            .collect()
    };
    let shape_usize = dims(&shape);
    let unit = unit(dtype, &shape_usize, &fill)?;
    let mut spans = Vec::with_capacity(segments.len());
    let mut needs = Vec::with_capacity(segments.len());
    for (index, segment) in segments.into_iter().enumerate() {
        let wrong = |why: String| {
            Err(Error::invalid(
                "gather",
                segment.file.as_str(),
                format!("segment {index}: {why}"),
            ))
        };
        if let Err(why) = crate::fs::check_path(&segment.file) {
            return wrong(why.into());
        }
        let stored = match DType::from_numpy(&segment.dtype) {
            Ok(stored) => stored,
            Err(error) => return wrong(error.to_string()),
        };
        if !convertible(stored, dtype) {
            let to = dtype.numpy();
            return wrong(format!(
                "{} does not widen to {to}; only integers widen, to where every value fits",
                stored.numpy()
            ));
        }
        let fits = segment.shape.len() == shape.len()
            && segment
                .shape
                .iter()
                .zip(&shape)
                .all(|(have, room)| have <= room);
        if !fits {
            return wrong(format!(
                "rows of shape {:?} do not fit into {shape:?}",
                segment.shape
            ));
        }
        let bytes = stored.tensor_bytes(&segment.shape);
        let end = bytes
            .and_then(|bytes| bytes.checked_mul(segment.rows))
            .and_then(|bytes| bytes.checked_add(segment.offset));
        let (Some(bytes), Some(end), Some(stop)) =
            (bytes, end, segment.pos.checked_add(segment.rows))
        else {
            return wrong("offset, pos, rows and shape overflow".into());
        };
        let Ok(row_bytes) = usize::try_from(bytes) else {
            return wrong("a row is larger than memory".into());
        };
        let (start, stop) = (segment.pos.clamp(lo, hi), stop.clamp(lo, hi));
        let skipped = start.saturating_sub(segment.pos);
        spans.push(Span {
            // Both are at most hi - lo, which fits.
            start: usize::try_from(start - lo).unwrap_or(rows),
            stop: usize::try_from(stop - lo).unwrap_or(rows),
            // Exact wherever a row is left, because `end` did not overflow.
            at: segment.offset.saturating_add(skipped.saturating_mul(bytes)),
        });
        needs.push(Need {
            start: segment.offset,
            end,
            dtype: stored,
            shape: dims(&segment.shape),
            row_bytes,
            checksum: if verify {
                segment.checksum
            } else {
                String::new()
            },
            file: segment.file,
            index,
        });
    }
    let pieces = winners(rows, &spans, &needs);
    let mut place = vec![None; needs.len()];
    for (index, _) in pieces.iter().filter_map(|piece| piece.from) {
        place[index] = Some(0);
    }
    let mut pieces = merge(pieces, &needs);
    // Keeps the segments that are read, and gives them their new indices.
    for (kept, place) in place.iter_mut().flatten().enumerate() {
        *place = kept;
    }
    let mut read = place.iter().map(Option::is_some);
    needs.retain(|_| read.next().unwrap_or(false));
    for (index, _) in pieces.iter_mut().filter_map(|piece| piece.from.as_mut()) {
        *index = place[*index].unwrap_or(0);
    }
    Ok(Plan {
        rows,
        row_bytes,
        dtype,
        shape: shape_usize,
        unit,
        pieces,
        needs,
    })
}

fn unit(dtype: DType, shape: &[usize], fill: &Fill) -> Result<Vec<u8>> {
    let wrong = |why: String| Err(Error::invalid("gather", "", why));
    match fill {
        Fill::Item(item) if dtype.item_size() == Some(item.len() as u64) => {
            // Equal bytes need no pattern.
            let one = item
                .first()
                .filter(|first| item.iter().all(|byte| byte == *first));
            Ok(one.map_or_else(|| item.clone(), |byte| vec![*byte]))
        }
        Fill::Item(item) => wrong(format!(
            "a fill of {} bytes is no item of {}",
            item.len(),
            dtype.numpy()
        )),
        Fill::Spread if shape.contains(&0) => Ok(vec![0]),
        Fill::Spread => match spread_unit(dtype, shape.last().copied().unwrap_or(1)) {
            Some(unit) => Ok(unit),
            None => wrong(format!(
                "{} cannot hold distinct ids for shape {shape:?}",
                dtype.numpy()
            )),
        },
    }
}

/// Rows `start..stop` of the destination; row `start` is at byte `at` of the file.
struct Span {
    start: usize,
    stop: usize,
    at: u64,
}

/// Which segment each row comes from, in n log n: a sweep over all starts and stops with the latest
/// segment on top of a heap.
fn winners(rows: usize, spans: &[Span], needs: &[Need]) -> Vec<Piece> {
    let mut starts: Vec<usize> = (0..spans.len())
        .filter(|&i| spans[i].start < spans[i].stop)
        .collect();
    starts.sort_by_key(|&i| spans[i].start);
    let mut cuts: Vec<usize> = starts
        .iter()
        .flat_map(|&i| [spans[i].start, spans[i].stop])
        .collect();
    cuts.extend([0, rows]);
    cuts.sort_unstable();
    cuts.dedup();
    let mut starts = starts.into_iter().peekable();
    let mut active = BinaryHeap::new();
    let mut pieces = Vec::new();
    for cut in cuts.windows(2) {
        let (from, to) = (cut[0], cut[1]);
        while let Some(i) = starts.next_if(|&i| spans[i].start <= from) {
            active.push(i);
        }
        while active.peek().is_some_and(|&i| spans[i].stop <= from) {
            active.pop();
        }
        let winner = active.peek().copied();
        let read = winner.filter(|&i| needs[i].row_bytes > 0).map(|i| {
            let skipped = (from - spans[i].start) as u64 * needs[i].row_bytes as u64;
            (i, spans[i].at + skipped)
        });
        pieces.push(Piece {
            rows: from..to,
            covered: winner.is_some(),
            from: read,
        });
    }
    pieces
}

/// Joins neighbours that are one read, or one fill.
fn merge(pieces: Vec<Piece>, needs: &[Need]) -> Vec<Piece> {
    let mut merged: Vec<Piece> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        if let Some(last) = merged.last_mut() {
            let joins = match (last.from, piece.from) {
                (None, None) => true,
                (Some((a, start)), Some((b, next))) => {
                    let (one, two) = (&needs[a], &needs[b]);
                    start + last.rows.len() as u64 * one.row_bytes as u64 == next
                        && (a == b
                            || (one.file == two.file
                                && one.dtype == two.dtype
                                && one.shape == two.shape
                                // What is verified lies in one tensor.
                                && one.checksum.is_empty()
                                && two.checksum.is_empty()))
                }
                _ => false,
            };
            if joins && last.covered == piece.covered {
                last.rows.end = piece.rows.end;
                continue;
            }
        }
        merged.push(piece);
    }
    merged
}
