//! Cuts the pieces of a batch into jobs over disjoint slices of the destinations, and runs them.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::thread::available_parallelism;

use super::convert::{Rows, paint};
use super::files::{Opened, open_one};
use super::plan::{Need, Plan};
use super::read::{Check, Reader};
use super::{Filled, Source};
use crate::error::{Error, Result};
use crate::format::{TensorInfo, segment_checksum};
use crate::fs::Fs;
use crate::slab::Slab;
use crate::threads;

/// A job reads or fills about this much.
const JOB: usize = 4 << 20;
/// A job that converts reads about this much, so that it stays in the cache.
const CONVERT: usize = 512 << 10;
/// The most threads.
const THREADS: usize = 8;

/// Where the rows and the marks of a request go.
#[derive(Debug, Default)]
pub(super) struct Target<'a> {
    out: Memory<'a>,
    valid: Memory<'a>,
}

#[derive(Debug, Default)]
enum Memory<'a> {
    #[default]
    None,
    Given(&'a mut [u8]),
    Pooled(Slab),
}

impl<'a> Target<'a> {
    pub(super) fn new(out: Option<&'a mut [u8]>, valid: Option<&'a mut [u8]>) -> Self {
        let given = |bytes: Option<&'a mut [u8]>| bytes.map_or(Memory::None, Memory::Given);
        Self { out: given(out), valid: given(valid) }
    }
}

impl Memory<'_> {
    fn bytes(&mut self) -> &mut [u8] {
        match self {
            Self::None => &mut [],
            Self::Given(bytes) => bytes,
            Self::Pooled(slab) => slab,
        }
    }

    fn into_slab(self) -> Option<Slab> {
        if let Self::Pooled(slab) = self { Some(slab) } else { None }
    }
}

/// What fills one slice.
struct Job<'a, F: Fs> {
    /// The index in the batch.
    request: usize,
    plan: &'a Plan,
    /// Locked by the one thread that runs the job.
    out: Mutex<&'a mut [u8]>,
    /// None: fill.
    read: Option<Read<'a, F>>,
}

struct Read<'a, F: Fs> {
    need: &'a Need,
    opened: &'a Opened<F>,
    offset: u64,
    check: Option<Check<'a>>,
}

/// Serves a batch whose files were opened; `index` finds a file's place in `opened`.
pub(super) fn run<'a, F: Fs>(
    source: &Source<'_, F>,
    index: &HashMap<&str, usize>,
    opened: &'a [Result<Opened<F>>],
    batch: Vec<(&'a Plan, Target<'_>)>,
) -> Vec<Result<Filled>> {
    // Checked and allocated before the first byte is read.
    let mut batch: Vec<_> = batch
        .into_iter()
        .map(|(plan, target)| {
            let files = check_files(plan, index, opened);
            let ready = files.and_then(|files| Ok((files, allocate(source, plan, target)?)));
            (plan, ready)
        })
        .collect();
    let mut jobs = Vec::new();
    for (request, (plan, ready)) in batch.iter_mut().enumerate() {
        if let Ok((files, target)) = ready {
            let mut valid = target.valid.bytes();
            for piece in &plan.pieces {
                let (now, later) = valid.split_at_mut(piece.rows.len());
                now.fill(u8::from(piece.covered));
                valid = later;
            }
            cut(&mut jobs, request, plan, files, target.out.bytes());
        }
    }
    let spare = Mutex::new(Vec::new());
    let done = threads::map(&jobs, helpers(&jobs), |job| {
        source.go_on()?;
        let mut scratch = spare.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        let result = job.run(source, &mut scratch);
        spare.lock().unwrap_or_else(PoisonError::into_inner).push(scratch);
        result
    });
    let mut failed: HashMap<usize, Error> = HashMap::new();
    for (job, result) in jobs.iter().zip(done) {
        if let Err(error) = result {
            failed.entry(job.request).or_insert(error);
        }
    }
    drop(jobs);
    let finish = |(request, (_, ready)): (usize, (_, Result<(_, Target<'_>)>))| {
        let (_, target) = ready?;
        match failed.remove(&request) {
            Some(error) => Err(error),
            None => Ok(Filled { out: target.out.into_slab(), valid: target.valid.into_slab() }),
        }
    };
    batch.into_iter().enumerate().map(finish).collect()
}

/// The open file of each need and what to check it against, or the first thing that is wrong.
type Files<'a, F> = Vec<(&'a Opened<F>, Option<Check<'a>>)>;

fn check_files<'a, F: Fs>(
    plan: &Plan,
    index: &HashMap<&str, usize>,
    opened: &'a [Result<Opened<F>>],
) -> Result<Files<'a, F>> {
    let one = |need: &Need| {
        let opened = opened[index[need.file.as_str()]].as_ref().map_err(Clone::clone)?;
        if need.end > opened.size {
            let (index, end, size) = (need.index, need.end, opened.size);
            let why = format!("segment {index} ends at byte {end}, but the file has {size} bytes");
            return Err(Error::corrupt("gather", need.file.as_str(), why));
        }
        let check = match opened.header.as_ref().filter(|_| !need.checksum.is_empty()) {
            Some(header) => {
                let start = plan.pieces.iter().filter_map(|piece| piece.from);
                let _ = start;
                Some(find(header, need)?)
            }
            None => None,
        };
        Ok((opened, check))
    };
    plan.needs.iter().map(one).collect()
}
