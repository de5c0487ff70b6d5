//! Cuts the pieces of a batch into jobs over disjoint slices of the destinations, and runs them.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::convert::{Rows, paint};
use super::engine::{self, Cache};
use super::files::{Files, Opened, check_files, open_again};
use super::plan::{Need, Plan};
use super::read::{Check, Reader};
use super::{Filled, Source, ring};
use crate::error::{Error, Result};
use crate::fs::Fs;
use crate::slab::Slab;
use crate::threads;

/// A job reads or fills about this much.
const JOB: usize = 4 << 20;
/// A job for a ring reads about this much: as many at once as a disk likes, a block each to check.
const RING_JOB: usize = 1 << 20;
/// A job that converts reads about this much, so that it stays in the cache.
const CONVERT: usize = 512 << 10;
/// The most threads; and where each takes much scratch.
const THREADS: usize = 8;
const HEAVY: usize = 3;

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
pub(super) struct Job<'a, F: Fs> {
    /// The index in the batch.
    request: usize,
    plan: &'a Plan,
    /// Locked by the one thread that runs the job; empty while the kernel has it.
    pub(super) out: Mutex<&'a mut [u8]>,
    /// None: fill.
    pub(super) read: Option<Read<'a, F>>,
}

pub(super) struct Read<'a, F: Fs> {
    pub(super) need: &'a Need,
    pub(super) opened: &'a Opened<F>,
    pub(super) offset: u64,
    pub(super) check: Option<Check<'a>>,
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
    let ready = batch.iter().filter_map(|(plan, ready)| {
        let (files, _) = ready.as_ref().ok()?;
        Some((*plan, files))
    });
    let way = match engine::choose(source, &ready.collect::<Vec<_>>()) {
        Ok(way) => way,
        Err(errno) => return batch.iter().map(|_| Err(engine::missing(errno))).collect(),
    };
    let most = if way.ring.is_some() { RING_JOB } else { JOB };
    let mut jobs = Vec::new();
    for (request, (plan, ready)) in batch.iter_mut().enumerate() {
        if let Ok((files, target)) = ready {
            let mut valid = target.valid.bytes();
            for piece in &plan.pieces {
                let (now, later) = valid.split_at_mut(piece.rows.len());
                now.fill(u8::from(piece.covered));
                valid = later;
            }
            cut(&mut jobs, request, plan, files, target.out.bytes(), most);
        }
    }
    let done = match way.ring {
        Some(ring) => ring::run(source, &jobs, ring, budget),
        None => on_threads(source, &jobs, helpers(&jobs, budget, way.cache)),
    };
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

/// One result per job.
fn on_threads<F: Fs>(
    source: &Source<'_, F>,
    jobs: &[Job<'_, F>],
    threads: usize,
) -> Vec<Result<()>> {
    let spare: Mutex<Vec<Scratch>> = Mutex::new(Vec::new());
    threads::map(jobs, threads, |job| {
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
    })
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

/// Appends the jobs that together write every byte of `out`; one reads at most `most` bytes, or a row.
fn cut<'a, F: Fs>(
    jobs: &mut Vec<Job<'a, F>>,
    request: usize,
    plan: &'a Plan,
    files: &Files<'a, F>,
    mut out: &'a mut [u8],
    most: usize,
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
        let equal = plan.stored(need).are_equal();
        while !rest.is_empty() {
            let (bytes, stored) = if equal {
                // Jobs end where blocks end, so that no block is hashed twice; or where pages do.
                let phase = (offset - check.map_or(0, |check| check.tensor.offset)) % most as u64;
                let most =
                    usize::try_from(most as u64 - phase).map_or(most, |most| most.min(rest.len()));
                (most, most)
            } else {
                let size = if check.is_some() { most } else { CONVERT };
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
fn helpers<F: Fs>(jobs: &[Job<'_, F>], budget: usize, cache: Cache) -> usize {
    let bytes = |job: &Job<'_, F>| job.out.lock().unwrap_or_else(PoisonError::into_inner).len();
    let deserved = jobs.iter().map(bytes).sum::<usize>() / (512 << 10) + jobs.len() / 32;
    if deserved == 0 {
        return 1;
    }
    // Memory is moved by cores; disks and servers are waited for.
    let most = match cache {
        Cache::Warm => threads::cores().clamp(2, THREADS),
        Cache::Cold | Cache::Unknown => THREADS,
    };
    // Converting what is checked takes 4 MiB of scratch per thread.
    let heavy = |job: &Job<'_, F>| {
        let read = job.read.as_ref().filter(|read| read.check.is_some());
        read.is_some_and(|read| !job.layout(read).are_equal())
    };
    let most = if jobs.iter().any(heavy) {
        most.min(HEAVY)
    } else {
        most
    };
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
pub(super) struct Scratch {
    rows: Vec<u8>,
    rest: Vec<u8>,
}

impl<'a, F: Fs> Job<'a, F> {
    /// How its rows are stored and wanted.
    pub(super) fn layout(&self, read: &Read<'a, F>) -> Rows<'a> {
        self.plan.stored(read.need)
    }

    /// How many stored bytes fill `out`.
    pub(super) fn stored(&self, out: &[u8]) -> usize {
        match &self.read {
            // Its slice may end within a row.
            Some(read) if self.layout(read).are_equal() => out.len(),
            Some(read) => out.len() / self.plan.row_bytes * read.need.row_bytes,
            None => 0,
        }
    }

    /// Puts stored bytes into place.
    pub(super) fn place(&self, read: &Read<'a, F>, stored: &[u8], out: &mut [u8]) {
        let layout = self.layout(read);
        if layout.are_equal() {
            out.copy_from_slice(stored);
            return;
        }
        if layout.are_narrower() {
            paint(out, &self.plan.unit);
        }
        layout.scatter(stored, out);
    }

    /// Fills its slice by plain reads.
    pub(super) fn run(&self, source: &Source<'_, F>, scratch: &mut Scratch) -> Result<()> {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(read) = &self.read else {
            paint(&mut out, &self.plan.unit);
            return Ok(());
        };
        let name = &*read.need.file;
        let again = match read.opened.file {
            Some(_) => None,
            None => Some(open_again(source, name)?),
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
        if self.layout(read).are_equal() {
            return get(&mut out);
        }
        let len = self.stored(&out);
        if scratch.rows.len() < len {
            scratch.rows.resize(len, 0);
        }
        let stored = &mut scratch.rows[..len];
        get(stored)?;
        self.place(read, stored, &mut out);
        Ok(())
    }
}
