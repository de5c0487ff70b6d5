//! Reads rows of segments straight into the caller's memory.
//!
//! ```text
//! plan    requests  -> disjoint pieces of rows    pure; every claim of a segment is checked
//! files   names     -> open files and sizes       each once; bounded descriptors
//! engine  samples   -> threads or rings           what the page cache has decides
//! jobs    pieces    -> disjoint slices            read, verify, widen or fill; scoped threads
//! ring    jobs      -> the same, by `io_uring`
//! ```
//!
//! Later segments win; rows that no segment covers get the fill and `valid` 0. Nothing is allocated or
//! read for a request before its segments fit the sizes of their files.

mod convert;
mod engine;
mod files;
mod jobs;
mod pieces;
mod plan;
mod read;
mod ring;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::format::DType;
use crate::fs::Fs;
use crate::slab::{Pool, Slab};

pub use engine::{COUNTS, Counts, Engine, check, uring_facts};
use jobs::Target;
use plan::Plan;

/// Rows of one field in one file, as the sender claims; nothing of it is trusted.
///
/// What the segments of a trace have in common may be shared: what was checked of one then holds of the next.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Segment {
    /// The file, relative to the store.
    pub file: Arc<str>,
    /// Where the rows start, from byte 0 of the file.
    pub offset: u64,
    /// The position of the first row in its sequence.
    pub pos: u64,
    /// How many rows.
    pub rows: u64,
    /// The numpy / `ml_dtypes` name of the stored type.
    pub dtype: Arc<str>,
    /// The stored shape of a row.
    pub shape: Arc<[u64]>,
    /// XXH3 of the tensor's block list, or "".
    pub checksum: Arc<str>,
}

impl Segment {
    /// Whether file, type and shape are those of another one, the very same.
    fn shares(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.file, &other.file)
            && Arc::ptr_eq(&self.dtype, &other.dtype)
            && Arc::ptr_eq(&self.shape, &other.shape)
    }
}

/// What goes where no segment has a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fill {
    /// One item of the destination's type.
    Item(Vec<u8>),
    /// 0, 1, 2, ... along the last axis: distinct expert ids, so that padding loads no single expert.
    Spread,
}

/// Rows `lo..hi` of some segments and where to put them.
#[derive(Debug)]
pub struct Request<'a> {
    /// The segments; later ones win where they overlap.
    pub segments: Vec<Segment>,
    /// The first position.
    pub lo: u64,
    /// One past the last position.
    pub hi: u64,
    /// The type of the destination.
    pub dtype: DType,
    /// The row shape of the destination; no segment's may exceed it on any axis.
    pub shape: Vec<u64>,
    /// What goes where no segment has a value.
    pub fill: Fill,
    /// `(hi - lo) * row bytes`; `None` takes memory from the pool.
    pub out: Option<&'a mut [u8]>,
    /// One byte per row, 1 where a segment covers it; `None` takes memory from the pool.
    pub valid: Option<&'a mut [u8]>,
}

/// The pooled memory of a request, in place of destinations that it did not bring.
#[derive(Debug, Default)]
pub struct Filled {
    /// The rows.
    pub out: Option<Slab>,
    /// The marks.
    pub valid: Option<Slab>,
}

/// Where a gather reads and allocates, and how it is stopped.
#[derive(Debug)]
pub struct Source<'a, F: Fs> {
    /// The filesystem.
    pub fs: &'a F,
    /// The store.
    pub dir: &'a F::Dir,
    /// Where results without a destination live.
    pub pool: &'a Pool,
    /// Set it to give up soon; what was not read by then is `EINTR`.
    pub stop: &'a AtomicBool,
    /// Whether to check every touched block of segments with a checksum.
    pub verify: bool,
    /// What reads.
    pub engine: Engine,
}

/// `(bytes of out, bytes of valid)` for rows `lo..hi` of this type and row shape.
pub fn sizes(lo: u64, hi: u64, dtype: DType, shape: &[u64]) -> Result<(usize, usize)> {
    plan::sizes(lo, hi, dtype, shape).map(|(rows, row_bytes)| (rows * row_bytes, rows))
}

/// Reads a batch; one result per request, in order. A failed request does not stop the others; its
/// destination holds anything.
///
/// Threads: at most 8, no more than there is work for, or 2 with a ring each; at most 16 for opening files.
pub fn gather<F: Fs>(source: &Source<'_, F>, requests: Vec<Request<'_>>) -> Vec<Result<Filled>> {
    let mut results: Vec<Option<Result<Filled>>> = Vec::new();
    let mut targets = Vec::new();
    let mut plans = Vec::new();
    for mut request in requests {
        let out = request.out.take();
        let valid = request.valid.take();
        let lens = (
            out.as_ref().map(|b| b.len()),
            valid.as_ref().map(|b| b.len()),
        );
        match plan::check(&request, lens, source.verify) {
            Ok(plan) => {
                plans.push((results.len(), plan));
                targets.push(Target::new(out, valid));
                results.push(None);
            }
            Err(error) => results.push(Some(Err(error))),
        }
    }
    // Requests of one file side by side, so that it is opened once.
    let mut order: Vec<usize> = (0..plans.len()).collect();
    order.sort_by_key(|&at| plans[at].1.needs.first().map(|need| &*need.file));
    let mut budget = files::budget();
    let mut rest = &order[..];
    while !rest.is_empty() {
        let (count, names) = wave(rest, &plans, budget);
        let (now, later) = rest.split_at(count);
        let opened = files::open(source, &names, budget);
        if budget > 1
            && opened
                .iter()
                .any(|file| file.as_ref().is_err_and(out_of_descriptors))
        {
            budget /= 2;
            continue;
        }
        let index: HashMap<&str, usize> = names
            .iter()
            .enumerate()
            .map(|(at, need)| (need.name, at))
            .collect();
        let batch = now
            .iter()
            .map(|&at| (&plans[at].1, std::mem::take(&mut targets[at])))
            .collect();
        for (&at, result) in now
            .iter()
            .zip(jobs::run(source, &index, &opened, budget, batch))
        {
            results[plans[at].0] = Some(result);
        }
        rest = later;
    }
    results
        .into_iter()
        .map(|result| result.unwrap_or_else(|| Err(stopped())))
        .collect()
}

/// How many of the next requests to serve at once so that their files stay within `budget` (at least
/// one request), and those files.
fn wave<'p>(
    rest: &[usize],
    plans: &'p [(usize, Plan)],
    budget: usize,
) -> (usize, Vec<files::Wanted<'p>>) {
    let mut names: Vec<files::Wanted<'p>> = Vec::new();
    let mut seen: HashMap<&str, usize> = HashMap::new();
    let mut count = 0;
    for &at in rest {
        let needs = &plans[at].1.needs;
        // An upper bound, which counts a file twice that one request names twice.
        let fresh = needs
            .iter()
            .filter(|need| !seen.contains_key(&*need.file))
            .count();
        if count > 0 && names.len() + fresh > budget {
            break;
        }
        for need in needs {
            let slot = *seen.entry(&need.file).or_insert(names.len());
            if slot == names.len() {
                names.push(files::Wanted {
                    name: &need.file,
                    header: false,
                });
            }
            names[slot].header |= !need.checksum.is_empty();
        }
        count += 1;
    }
    (count, names)
}

fn out_of_descriptors(error: &Error) -> bool {
    matches!(error.errno(), Some(Errno::MFILE | Errno::NFILE))
}

fn stopped() -> Error {
    Error::os("gather", "", Errno::INTR)
}

impl<F: Fs> Source<'_, F> {
    fn go_on(&self) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) {
            Err(stopped())
        } else {
            Ok(())
        }
    }
}
