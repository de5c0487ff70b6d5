//! Which engine reads a wave of files: by what the page cache has of them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

use super::Source;
use super::files::{Files, Opened};
use super::plan::Plan;
use crate::error::Error;
use crate::fs::{Fs, direct};
use crate::uring::{Aligned, Facts, Ring};

/// What reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Engine {
    /// `io_uring` for what is cold and deserves it, else threads; threads where `io_uring` is blocked.
    #[default]
    Auto,
    /// `pread` on threads.
    Threads,
    /// `io_uring`; an error where it is blocked.
    Uring,
}

/// What this process did, for `engine_report`. A forked child goes on counting from its parent's numbers.
#[derive(Debug, Default)]
pub struct Counts {
    /// Waves of files read by threads.
    pub threads: AtomicU64,
    /// Waves of files read by `io_uring`.
    pub uring: AtomicU64,
    /// Waves that `io_uring` should have read and was not to be had for.
    pub blocked: AtomicU64,
    /// Files read around the page cache.
    pub direct: AtomicU64,
    /// Files whose filesystem refused that, when asked or at a read.
    pub refused: AtomicU64,
}

/// The counts of this process.
pub static COUNTS: Counts = Counts {
    threads: AtomicU64::new(0),
    uring: AtomicU64::new(0),
    blocked: AtomicU64::new(0),
    direct: AtomicU64::new(0),
    refused: AtomicU64::new(0),
};

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Why `io_uring`, which was asked for, is not to be had, and what to do.
pub(super) fn missing(errno: Errno) -> Error {
    let hint = match errno {
        Errno::PERM => {
            "io_uring is forbidden here, by a seccomp filter or the sysctl kernel.io_uring_disabled; \
             allow it, or use engine=\"auto\""
        }
        Errno::MFILE | Errno::NFILE => "too many files are open; raise ulimit -n, or open fewer",
        Errno::NOMEM => {
            "io_uring needs more locked memory than RLIMIT_MEMLOCK allows; raise it, or use \
             engine=\"auto\""
        }
        _ => "this kernel has no io_uring that can read; use engine=\"auto\"",
    };
    Error::os("io_uring", "", errno).with_hint(hint)
}

/// What the kernel gives a ring made now; the error says what to do.
pub fn uring_facts() -> Result<Facts, Error> {
    Ring::new().map(|ring| ring.facts()).map_err(missing)
}

/// Whether an engine can run here; the error says what to do.
pub fn check(engine: Engine) -> Result<(), Error> {
    match engine {
        Engine::Uring => uring_facts().map(drop),
        Engine::Auto | Engine::Threads => Ok(()),
    }
}

/// Whether what a wave reads is in the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cache {
    Warm,
    Cold,
    /// The filesystem does not say: a server's, as a rule.
    Unknown,
}

/// How a wave is read.
pub(super) struct Way {
    pub(super) cache: Cache,
    /// None: by threads.
    pub(super) ring: Option<Ring>,
}

/// A sample for each so much of a large piece.
const STEP: usize = 4 << 20;
/// About how many small pieces are sampled.
const SAMPLES: usize = 64;
/// From this size on a piece is large.
const LARGE: usize = 1 << 20;
/// Cold waves of less go to threads: making rings costs as much as some reads.
const RING_BYTES: u64 = 2 << 20;
/// Or of fewer pieces.
const RING_PIECES: u64 = 64;

/// What is known of a file, or of a wave.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    pieces: u64,
    bytes: u64,
    samples: u64,
    cold: u64,
    /// Pieces of files beyond the budget: opened for each read, which a ring does not do.
    closed: u64,
    unknown: bool,
}

/// Chooses; `wave` are the requests whose files are open, and their files.
///
/// The error is why `io_uring`, which was asked for, is not to be had.
pub(super) fn choose<F: Fs>(
    source: &Source<'_, F>,
    wave: &[(&Plan, &Files<'_, F>)],
) -> Result<Way, Errno> {
    let by_file = look(source, wave);
    let mut all = Seen::default();
    for (_, seen) in by_file.values() {
        all.pieces += seen.pieces;
        all.bytes += seen.bytes;
        all.samples += seen.samples;
        all.cold += seen.cold;
        all.closed += seen.closed;
        all.unknown |= seen.unknown;
    }
    let cache = if all.unknown {
        Cache::Unknown
    } else if all.cold * 2 > all.samples {
        Cache::Cold
    } else {
        Cache::Warm
    };
    let enough =
        (all.bytes >= RING_BYTES || all.pieces >= RING_PIECES) && all.closed * 2 <= all.pieces;
    let wanted = match source.engine {
        Engine::Auto => cache == Cache::Cold && enough,
        Engine::Threads => false,
        Engine::Uring => true,
    };
    let ring = match wanted.then(Ring::new).transpose() {
        Ok(ring) => ring,
        Err(errno) if source.engine == Engine::Uring => return Err(errno),
        Err(_) => {
            count(&COUNTS.blocked);
            None
        }
    };
    if ring.is_some() {
        for (opened, seen) in by_file.values() {
            prepare(source, opened, seen);
        }
    }
    count(if ring.is_some() {
        &COUNTS.uring
    } else {
        &COUNTS.threads
    });
    Ok(Way { cache, ring })
}

/// Asks the page cache for the middle of every part of a large piece, and for some of the small ones.
fn look<'a, F: Fs>(
    source: &Source<'_, F>,
    wave: &[(&'a Plan, &Files<'a, F>)],
) -> BTreeMap<&'a str, (&'a Opened<F>, Seen)> {
    let mut seen: BTreeMap<&str, (&Opened<F>, Seen)> = BTreeMap::new();
    let pieces = wave
        .iter()
        .map(|(plan, _)| plan.pieces.len())
        .sum::<usize>();
    let stride = pieces / SAMPLES + 1;
    let mut small = 0;
    for (plan, files) in wave {
        for piece in &plan.pieces {
            let Some((need, offset)) = piece.from else {
                continue;
            };
            let opened = files[need].0;
            let need = &plan.needs[need];
            let len = piece.rows.len() * need.row_bytes;
            let (_, seen) = seen
                .entry(&need.file)
                .or_insert_with(|| (opened, Seen::default()));
            seen.pieces += 1;
            seen.bytes += len as u64;
            if len < LARGE {
                small += 1;
                if small % stride != 1 % stride {
                    continue;
                }
            }
            let fd = opened
                .file
                .as_ref()
                .and_then(|file| source.fs.file_fd(file));
            for at in (0..len).step_by(STEP) {
                let middle = offset + (at + (len - at).min(STEP) / 2) as u64;
                match fd.and_then(|fd| direct::is_cached(fd, middle)) {
                    Some(cached) => {
                        seen.samples += 1;
                        seen.cold += u64::from(!cached);
                    }
                    None => seen.unknown = true,
                }
            }
        }
    }
    seen
}

/// Readies a file for a ring: reads of it wait (a file opened without waiting would answer `EAGAIN`), and
/// go around the page cache if it has next to nothing of it.
fn prepare<F: Fs>(source: &Source<'_, F>, opened: &Opened<F>, seen: &Seen) {
    let Some(fd) = opened
        .file
        .as_ref()
        .and_then(|file| source.fs.file_fd(file))
    else {
        return;
    };
    // Not all: a sample may have been brought in by the one before it.
    let cold = seen.cold > 0 && seen.cold * 4 >= seen.samples * 3 && !seen.unknown;
    if cold && seen.bytes >= LARGE as u64 * seen.pieces {
        match direct::set_direct(fd, true, Aligned::TO) {
            Ok(()) => {
                opened.direct.store(true, Ordering::Relaxed);
                count(&COUNTS.direct);
                return;
            }
            Err(_) => count(&COUNTS.refused),
        }
    }
    // What refuses this refuses the reads too, and those say why.
    let _ = direct::set_direct(fd, false, Aligned::TO);
}

/// Reads of this file use the page cache again; `refused`: because the filesystem took the flag and then
/// refused a read.
pub(super) fn undirect<F: Fs>(source: &Source<'_, F>, opened: &Opened<F>, refused: bool) {
    let fd = opened
        .file
        .as_ref()
        .and_then(|file| source.fs.file_fd(file));
    let Some(fd) = fd else { return };
    // Whoever comes second must not read before the flag is gone, so each clears it; one counts.
    let _ = direct::set_direct(fd, false, Aligned::TO);
    if opened.direct.swap(false, Ordering::Relaxed) && refused {
        count(&COUNTS.refused);
    }
}
