//! Runs the jobs of a wave on rings: reads straight into the destinations where rows are stored as they
//! are wanted, through scratch where they are converted, checked beyond their edges, or not on a page.

use std::mem;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rustix::io::Errno;

use super::Source;
use super::engine::undirect;
use super::jobs::{Job, Scratch};
use crate::error::{Context, Result};
use crate::format::BLOCK;
use crate::fs::Fs;
use crate::threads;
use crate::uring::{Aligned, Buffer, DEPTH, Read, Ring, Work};

/// Destination bytes that a ring has with the kernel at once.
const FLIGHT: usize = 16 << 20;
/// Bytes of scratch per ring that the kernel fills, or one job's.
const SCRATCH: usize = 5 << 20;
/// Bytes of scratch that a ring keeps for later.
const SPARE: usize = 2 << 20;
/// The most rings, each with its thread: one keeps a disk busy, two convert and check.
const RINGS: usize = 2;

/// One result per job. `ring` is the calling thread's; a helper that gets none leaves the work to it. Each
/// thread may have to open a file again, so that they stay within `budget`.
pub(super) fn run<F: Fs>(
    source: &Source<'_, F>,
    jobs: &[Job<'_, F>],
    ring: Ring,
    budget: usize,
) -> Vec<Result<()>> {
    let cursor = AtomicUsize::new(0);
    let work = |mut ring: Ring| {
        let mut driver = Driver {
            source,
            jobs,
            cursor: &cursor,
            held: None,
            flight: 0,
            scratch: 0,
            spare: Vec::new(),
            plain: Scratch::default(),
            done: Vec::new(),
        };
        ring.run(DEPTH, &mut driver);
        driver.done
    };
    let rings = threads::cores().min(RINGS).min(budget);
    let mut results: Vec<Option<Result<()>>> = jobs.iter().map(|_| None).collect();
    thread::scope(|scope| {
        let helpers: Vec<_> = (1..rings.min(jobs.len()))
            .map_while(|_| {
                let helper = || Ring::new().map(work).unwrap_or_default();
                thread::Builder::new().spawn_scoped(scope, helper).ok()
            })
            .collect();
        let mut parts = vec![work(ring)];
        for helper in helpers {
            match helper.join() {
                Ok(part) => parts.push(part),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        for (index, result) in parts.into_iter().flatten() {
            results[index] = Some(result);
        }
    });
    results
        .into_iter()
        .map(|result| result.unwrap_or_else(|| Err(super::stopped())))
        .collect()
}

/// The jobs of one ring.
struct Driver<'d, 'a, F: Fs> {
    source: &'d Source<'d, F>,
    jobs: &'d [Job<'a, F>],
    cursor: &'d AtomicUsize,
    /// A job that waits for room.
    held: Option<usize>,
    /// Bytes with the kernel.
    flight: usize,
    /// Of these in scratch.
    scratch: usize,
    spare: Vec<Aligned>,
    plain: Scratch,
    done: Vec<(usize, Result<()>)>,
}

/// What a job reads: `len` bytes of the file from byte `from` on.
struct Fetch {
    from: u64,
    len: usize,
    /// Without what a direct read rounds up.
    wanted: usize,
    /// Where its rows start in them.
    rows: usize,
    /// Where the blocks to check start in them.
    blocks: usize,
}

impl<'a, F: Fs> Driver<'_, 'a, F> {
    /// What to read for a job, and where to. `Err` has the result of a job that is done already; none if
    /// there is no room for it now.
    fn start(&mut self, index: usize) -> Option<std::result::Result<Reading<'a>, Result<()>>> {
        let job = &self.jobs[index];
        let mut out = job.out.lock().unwrap_or_else(PoisonError::into_inner);
        let file = job.read.as_ref().and_then(|read| {
            let file = self.source.fs.file_fd(read.opened.file.as_ref()?)?;
            Some((read, file))
        });
        let Some((read, file)) = file else {
            drop(out);
            return Some(Err(job.run(self.source, &mut self.plain)));
        };
        let direct = read.opened.direct.load(Ordering::Relaxed);
        let fetch = fetch(read, job.stored(&out), direct);
        let straight = job.layout(read).are_equal()
            && fetch.len == out.len()
            && (!direct || out.as_ptr().addr().is_multiple_of(Aligned::TO));
        let full = self.flight > 0 && self.flight + fetch.len > FLIGHT;
        if full || (!straight && self.scratch > 0 && self.scratch + fetch.len > SCRATCH) {
            return None;
        }
        self.flight += fetch.len;
        let buffer = if straight {
            Buffer::Borrowed(mem::take(&mut *out))
        } else {
            self.scratch += fetch.len;
            let mut scratch = self.spare.pop().unwrap_or_default();
            scratch.resize(fetch.len);
            Buffer::Owned(scratch)
        };
        let (from, wanted) = (fetch.from, fetch.wanted);
        Some(Ok(Read::new(file, from, buffer, wanted, (index, fetch))))
    }

    /// What becomes of a job whose bytes came, or did not.
    fn finish(&mut self, reading: Reading<'a>) -> Result<()> {
        let Read {
            buffer,
            got,
            wanted,
            error,
            tag: (index, fetch),
            ..
        } = reading;
        let job = &self.jobs[index];
        let mut out = job.out.lock().unwrap_or_else(PoisonError::into_inner);
        self.flight -= fetch.len;
        let mut scratch = match buffer {
            Buffer::Borrowed(bytes) => {
                *out = bytes;
                None
            }
            Buffer::Owned(scratch) => {
                self.scratch -= fetch.len;
                Some(scratch)
            }
        };
        let Some(read) = &job.read else {
            return Ok(());
        };
        let result = match error {
            Some(Errno::INVAL | Errno::OPNOTSUPP) => {
                undirect(self.source, read.opened, true);
                None
            }
            Some(errno) => Some(Err(errno).context("gather", &read.need.file)),
            // The end of the file: said by the reads that every engine has in common.
            None if got < wanted => {
                undirect(self.source, read.opened, false);
                None
            }
            None => {
                let bytes = match &mut scratch {
                    Some(scratch) => scratch.bytes(),
                    None => &mut **out,
                };
                let checked = read.check.map_or(Ok(()), |check| {
                    let at = fetch.from + fetch.blocks as u64;
                    check.matches(&read.need.file, &bytes[fetch.blocks..wanted], at)
                });
                if let Some(scratch) = scratch.as_mut().filter(|_| checked.is_ok()) {
                    let stored = job.stored(&out);
                    let stored = &scratch.bytes()[fetch.rows..fetch.rows + stored];
                    job.place(read, stored, &mut out);
                }
                Some(checked)
            }
        };
        let kept: usize = self.spare.iter().map(Aligned::capacity).sum();
        self.spare
            .extend(scratch.filter(|scratch| kept + scratch.capacity() <= SPARE));
        drop(out);
        result.unwrap_or_else(|| job.run(self.source, &mut self.plain))
    }
}

type Reading<'a> = Read<'a, (usize, Fetch)>;

impl<'a, F: Fs> Work<Reading<'a>> for Driver<'_, 'a, F> {
    fn next(&mut self) -> Option<Reading<'a>> {
        loop {
            self.source.go_on().ok()?;
            let index = self
                .held
                .take()
                .unwrap_or_else(|| self.cursor.fetch_add(1, Ordering::Relaxed));
            if index >= self.jobs.len() {
                return None;
            }
            match self.start(index) {
                Some(Ok(reading)) => return Some(reading),
                Some(Err(result)) => self.done.push((index, result)),
                None => {
                    self.held = Some(index);
                    return None;
                }
            }
        }
    }

    fn done(&mut self, reading: Reading<'a>) {
        let index = reading.tag.0;
        let result = self.finish(reading);
        self.done.push((index, result));
    }
}

/// The bytes that a read of `stored` bytes takes: whole blocks where it checks, whole pages where it is
/// direct.
fn fetch<F: Fs>(read: &super::jobs::Read<'_, F>, stored: usize, direct: bool) -> Fetch {
    let (mut from, mut end) = (read.offset, read.offset + stored as u64);
    if let Some(check) = read.check {
        let tensor = check.tensor;
        from -= (from - tensor.offset) % BLOCK;
        let whole = (end - tensor.offset).next_multiple_of(BLOCK);
        end = tensor.offset + whole.min(tensor.len);
    }
    let (blocks, mut to) = (from, end);
    if direct {
        let page = Aligned::TO as u64;
        from -= from % page;
        to = to.next_multiple_of(page);
    }
    // At most a job, two blocks and two pages.
    let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    Fetch {
        from,
        len: size(to - from),
        wanted: size(end - from),
        rows: size(read.offset - from),
        blocks: size(blocks - from),
    }
}
