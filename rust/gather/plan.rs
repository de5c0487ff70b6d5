//! What a request and its segments claim, checked. Pure: all arithmetic on claims is checked here, once.

use std::sync::Arc;

use super::convert::{convertible, spread_unit};
use super::pieces::{Piece, Span, resolve};
use super::{Fill, Request, Segment};
use crate::error::{Error, Result};
use crate::format::DType;
use crate::fs::check_path;

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
    pub(super) file: Arc<str>,
    /// The first byte of the segment.
    pub(super) start: u64,
    /// One past the last byte of the segment.
    pub(super) end: u64,
    pub(super) dtype: DType,
    pub(super) shape: Arc<[usize]>,
    /// Bytes of a stored row; not 0.
    pub(super) row_bytes: usize,
    /// "" unless it is to be verified.
    pub(super) checksum: Arc<str>,
    /// Its index in the request, for messages.
    pub(super) index: usize,
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
    request: &Request<'_>,
    lens: (Option<usize>, Option<usize>),
    verify: bool,
) -> Result<Plan> {
    let (rows, row_bytes) = sizes(request.lo, request.hi, request.dtype, &request.shape)?;
    let wants = [("out", lens.0, rows * row_bytes), ("valid", lens.1, rows)];
    for (name, have, want) in wants {
        if let Some(have) = have.filter(|&have| have != want) {
            let why = format!("{name} has {have} bytes, but {want} are to be written");
            return Err(Error::invalid("gather", "", why));
        }
    }
    let (dtype, shape) = (request.dtype, dims(&request.shape));
    let unit = unit(dtype, &shape, &request.fill)?;
    let mut spans = Vec::with_capacity(request.segments.len());
    let mut needs = Vec::with_capacity(request.segments.len());
    let mut last: Option<(&Segment, Layout)> = None;
    for (index, segment) in request.segments.iter().enumerate() {
        let wrong = |why: String| {
            let why = format!("segment {index}: {why}");
            Error::invalid("gather", &*segment.file, why)
        };
        let known = match last {
            Some((before, known)) if segment.shares(before) => known,
            _ => layout(segment, request).map_err(wrong)?,
        };
        let (span, need) = claim(index, segment, known.clone(), request, verify).map_err(wrong)?;
        last = Some((segment, known));
        spans.push(span);
        needs.push(need);
    }
    let (pieces, needs) = resolve(rows, &spans, needs);
    Ok(Plan {
        rows,
        row_bytes,
        dtype,
        shape,
        unit,
        pieces,
        needs,
    })
}

/// How the rows of a segment are stored.
#[derive(Clone)]
struct Layout {
    dtype: DType,
    shape: Arc<[usize]>,
    row_bytes: usize,
}

/// What a segment says of its file and its rows, if it can be true; why it cannot otherwise.
fn layout(segment: &Segment, request: &Request<'_>) -> std::result::Result<Layout, String> {
    let Request { dtype, shape, .. } = request;
    check_path(&segment.file)?;
    let stored = DType::from_numpy(&segment.dtype).map_err(|error| error.to_string())?;
    if !convertible(stored, *dtype) {
        return Err(format!(
            "{} does not widen to {}; only integers widen, to where every value fits",
            stored.numpy(),
            dtype.numpy()
        ));
    }
    let mut axes = segment.shape.iter().zip(shape);
    if segment.shape.len() != shape.len() || axes.any(|(have, room)| have > room) {
        return Err(format!(
            "rows of shape {:?} do not fit into {shape:?}",
            segment.shape
        ));
    }
    let bytes = stored.tensor_bytes(&segment.shape);
    Ok(Layout {
        dtype: stored,
        shape: dims(&segment.shape).into(),
        row_bytes: bytes
            .and_then(|bytes| usize::try_from(bytes).ok())
            .ok_or(OVERFLOW)?,
    })
}

/// What a segment says of its place, if it can be true; why it cannot otherwise.
fn claim(
    index: usize,
    segment: &Segment,
    layout: Layout,
    request: &Request<'_>,
    verify: bool,
) -> std::result::Result<(Span, Need), String> {
    let (lo, hi) = (request.lo, request.hi);
    let bytes = layout.row_bytes as u64;
    let claimed = || {
        let end = bytes
            .checked_mul(segment.rows)?
            .checked_add(segment.offset)?;
        Some((end, segment.pos.checked_add(segment.rows)?))
    };
    let (end, stop) = claimed().ok_or(OVERFLOW)?;
    let (start, stop) = (segment.pos.clamp(lo, hi), stop.clamp(lo, hi));
    let skipped = start.saturating_sub(segment.pos);
    let span = Span {
        // Both are at most hi - lo, which fits.
        start: usize::try_from(start - lo).unwrap_or(usize::MAX),
        stop: usize::try_from(stop - lo).unwrap_or(usize::MAX),
        // Exact wherever a row is left, because `end` did not overflow.
        at: segment.offset.saturating_add(skipped.saturating_mul(bytes)),
    };
    let need = Need {
        file: segment.file.clone(),
        start: segment.offset,
        end,
        dtype: layout.dtype,
        shape: layout.shape,
        row_bytes: layout.row_bytes,
        checksum: if verify {
            segment.checksum.clone()
        } else {
            Arc::default()
        },
        index,
    };
    Ok((span, need))
}

const OVERFLOW: &str = "offset, pos, rows and shape overflow";

/// A dimension beyond `usize` belongs to a shape of no bytes: its size is never used.
fn dims(shape: &[u64]) -> Vec<usize> {
    shape
        .iter()
        .map(|&dim| usize::try_from(dim).unwrap_or(usize::MAX))
        .collect()
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
