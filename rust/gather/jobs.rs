//! Cuts the pieces of a batch into jobs over disjoint slices of the destinations, and runs them.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::thread::available_parallelism;

use super::convert::{Rows, paint};
use super::files::{Files, Opened, check_files, open_one};
use super::plan::{Need, Plan};
use super::read::{Check, Reader};
use super::{Filled, Source};
use crate::error::{Error, Result};
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
        Self {
            out: given(out),
            valid: given(valid),
        }
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
        if let Self::Pooled(slab) = self {
            Some(slab)
        } else {
            None
        }
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
    budget: usize,
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
    let spare: Mutex<Vec<Scratch>> = Mutex::new(Vec::new());
    let done = threads::map(&jobs, helpers(&jobs, budget), |job| {
        source.go_on()?;
        let mut scratch = spare
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop()
            .unwrap_or_default();
        let result = job.run(source, &mut scratch);
        spare
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(scratch);
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
            None => Ok(Filled {
                out: target.out.into_slab(),
                valid: target.valid.into_slab(),
            }),
        }
    };
    batch.into_iter().enumerate().map(finish).collect()
}

/// Gives a request the memory that it did not bring.
fn allocate<'a, F: Fs>(
    source: &Source<'_, F>,
    plan: &Plan,
    mut target: Target<'a>,
) -> Result<Target<'a>> {
    if matches!(target.out, Memory::None) {
        target.out = Memory::Pooled(source.pool.take(plan.rows * plan.row_bytes)?);
    }
    if matches!(target.valid, Memory::None) {
        target.valid = Memory::Pooled(source.pool.take(plan.rows)?);
    }
    Ok(target)
}

/// Appends the jobs that together write every byte of `out`.
fn cut<'a, F: Fs>(
    jobs: &mut Vec<Job<'a, F>>,
    request: usize,
    plan: &'a Plan,
    files: &Files<'a, F>,
    mut out: &'a mut [u8],
) {
    if plan.row_bytes == 0 {
        return;
    }
    for piece in &plan.pieces {
        let (mut rest, after) =
            std::mem::take(&mut out).split_at_mut(piece.rows.len() * plan.row_bytes);
        out = after;
        let Some((need, mut offset)) = piece.from else {
            let most = (JOB / plan.row_bytes).max(1) * plan.row_bytes;
            jobs.extend(rest.chunks_mut(most).map(|out| Job {
                request,
                plan,
                out: Mutex::new(out),
                read: None,
            }));
            continue;
        };
        let (opened, check) = files[need];
        let need = &plan.needs[need];
        let direct = plan.stored(need).are_equal();
        while !rest.is_empty() {
            let (bytes, stored) = if direct {
                // Jobs end where blocks end, so that no block is hashed twice.
                let phase = check.map_or(0, |check| (offset - check.tensor.offset) % JOB as u64);
                let most =
                    usize::try_from(JOB as u64 - phase).map_or(JOB, |most| most.min(rest.len()));
                (most, most)
            } else {
                let size = if check.is_some() { JOB } else { CONVERT };
                let rows = (size / need.row_bytes).clamp(1, rest.len() / plan.row_bytes);
                (rows * plan.row_bytes, rows * need.row_bytes)
            };
            let (now, later) = rest.split_at_mut(bytes);
            rest = later;
            let read = Some(Read {
                need,
                opened,
                offset,
                check,
            });
            jobs.push(Job {
                request,
                plan,
                out: Mutex::new(now),
                read,
            });
            offset += stored as u64;
        }
    }
}

/// How many threads the jobs deserve; starting one costs as much as reading some 100 KiB. Each may have
/// to open a file again, so that they stay within `budget` too.
fn helpers<F: Fs>(jobs: &[Job<'_, F>], budget: usize) -> usize {
    let bytes = |job: &Job<'_, F>| job.out.lock().unwrap_or_else(PoisonError::into_inner).len();
    let deserved = jobs.iter().map(bytes).sum::<usize>() / (512 << 10) + jobs.len() / 32;
    if deserved == 0 {
        return 1;
    }
    // On few cores too: these threads wait for disks and servers as well.
    let most = available_parallelism()
        .map_or(4, usize::from)
        .clamp(4, THREADS);
    deserved.min(most).min(budget)
}

impl Plan {
    fn stored<'a>(&'a self, need: &'a Need) -> Rows<'a> {
        Rows {
            from: need.dtype,
            shape: &need.shape,
            to: self.dtype,
            to_shape: &self.shape,
        }
    }
}

/// Memory that a job uses on the way; handed from job to job.
#[derive(Debug, Default)]
struct Scratch {
    rows: Vec<u8>,
    rest: Vec<u8>,
}

impl<F: Fs> Job<'_, F> {
    fn run(&self, source: &Source<'_, F>, scratch: &mut Scratch) -> Result<()> {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(read) = &self.read else {
            paint(&mut out, &self.plan.unit);
            return Ok(());
        };
        let name = read.need.file.as_str();
        let again = match read.opened.file {
            Some(_) => None,
            None => Some(open_one(source, name)?),
        };
        let Some(file) = read.opened.file.as_ref().or(again.as_ref()) else {
            return Ok(());
        };
        let file = Reader {
            fs: source.fs,
            file,
            name,
        };
        let mut get = |buf: &mut [u8]| match read.check {
            Some(check) => file.verified(buf, read.offset, check, &mut scratch.rest),
            None => file.exact(buf, read.offset),
        };
        let layout = self.plan.stored(read.need);
        if layout.are_equal() {
            return get(&mut out);
        }
        let len = out.len() / self.plan.row_bytes * read.need.row_bytes;
        if scratch.rows.len() < len {
            scratch.rows.resize(len, 0);
        }
        let stored = &mut scratch.rows[..len];
        get(stored)?;
        if layout.are_narrower() {
            paint(&mut out, &self.plan.unit);
        }
        layout.scatter(stored, &mut out);
        Ok(())
    }
}
