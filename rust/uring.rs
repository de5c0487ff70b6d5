//! Batches of reads and of `statx` on an `io_uring` of the calling thread, made for one call.
//!
//! What the kernel reads and writes belongs to an *operation*: it owns or borrows its memory and its
//! descriptor, and [`Ring::run`] holds it from before the kernel hears of it until the kernel has
//! answered. `run` is a plain call: it returns, or unwinds, only when every answer is in. So a ring is
//! closed, and the memory free again, only when the kernel is done with both.
//!
//! <https://man7.org/linux/man-pages/man7/io_uring.7.html>

use std::ffi::CString;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::types::Fd;
use io_uring::{IoUring, Probe, opcode, squeue};
use rustix::fs::{AtFlags, Statx, StatxFlags};
use rustix::io::{Errno, pread, retry_on_intr};

use crate::fs::Io;

/// The most operations that a ring has with the kernel at once.
pub const DEPTH: usize = 64;
/// One read moves at most this much, on every way to the kernel.
const MOST: usize = 0x7fff_f000;

/// An `io_uring` for the thread that made it.
pub struct Ring {
    inner: IoUring,
    /// The kernel would take no more: it is not entered again, and what is left is done by plain calls.
    broken: bool,
    facts: Facts,
}

/// What the kernel gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Completions are delivered to the waiting thread only when it waits (Linux 6.1), cooperatively
    /// (5.19), or by interrupting it.
    pub completions: &'static str,
}

/// Where the operations of a ring come from and go to.
pub trait Work<O: Operation> {
    /// The next operation; none if there is none now. It is asked again whenever one is done.
    fn next(&mut self) -> Option<O>;
    /// Takes back an operation that is done.
    fn done(&mut self, operation: O);
}

/// [`Read`] and [`Stat`].
#[allow(private_bounds)]
pub trait Operation: sealed::Operation {}
impl<T> Operation for Read<'_, T> {}
impl Operation for Stat<'_> {}

mod sealed {
    use super::squeue;

    pub(super) trait Operation {
        /// What the kernel is asked to do next for it. Every address in it stays good, wherever the
        /// operation itself moves, until it is dropped or handed out.
        fn entry(&mut self) -> squeue::Entry;
        /// Takes an answer; whether it asks for more.
        fn answer(&mut self, result: i32) -> bool;
        /// Does what is left by plain calls.
        fn plainly(&mut self);
    }
}

impl Ring {
    /// A ring for this thread. `EPERM` where it is forbidden, `ENOSYS` where it, or one of its
    /// operations that are used here, is missing, `ENOMEM` where locked memory is limited.
    pub fn new() -> Io<Self> {
        let entries = u32::try_from(DEPTH).unwrap_or(64);
        let mut last = Errno::NOSYS;
        for completions in ["deferred", "cooperative", "interrupting"] {
            let mut builder = IoUring::builder();
            builder.setup_clamp().dontfork();
            match completions {
                "deferred" => {
                    builder.setup_single_issuer().setup_defer_taskrun();
                }
                "cooperative" => {
                    builder.setup_coop_taskrun();
                }
                _ => {}
            }
            match builder.build(entries) {
                Ok(ring) => return Self::probed(ring, completions),
                Err(error) => last = errno(&error),
            }
            // An unknown flag: without it.
            if last != Errno::INVAL {
                break;
            }
        }
        Err(last)
    }

    fn probed(ring: IoUring, completions: &'static str) -> Io<Self> {
        let mut probe = Probe::new();
        // Older kernels have no probe, and no reads without a vector either.
        let known = ring.submitter().register_probe(&mut probe).is_ok();
        let needed = [opcode::Read::CODE, opcode::Statx::CODE];
        if !known || needed.iter().any(|&code| !probe.is_supported(code)) {
            return Err(Errno::NOSYS);
        }
        Ok(Self {
            inner: ring,
            broken: false,
            facts: Facts { completions },
        })
    }

    /// What the kernel gave.
    pub fn facts(&self) -> Facts {
        self.facts
    }

    /// Bounds the kernel threads that serve what has no asynchronous form (as `statx`). Before 5.15
    /// there is no such bound, and nothing happens.
    pub fn limit_workers(&self, workers: u32) {
        let mut most = [workers, workers];
        let _ = self.inner.submitter().register_iowq_max_workers(&mut most);
    }

    /// Runs operations, at most `depth` at once, until `work` has no more and all are done. Also when
    /// `work` panics, the kernel's answers are awaited first.
    pub fn run<O: Operation>(&mut self, depth: usize, work: &mut impl Work<O>) {
        let mut flight = Flight::new(self, depth);
        loop {
            while flight.has_room() {
                let Some(operation) = work.next() else { break };
                flight.start(operation);
            }
            if flight.is_empty() {
                return;
            }
            flight.wait();
            while let Some(operation) = flight.finished.pop() {
                work.done(operation);
            }
        }
    }
}

/// The operations of a run, from before the kernel hears of them until it has answered.
struct Flight<'r, O: Operation> {
    ring: &'r mut Ring,
    /// By the number in the entry's user data.
    slots: Vec<Option<O>>,
    free: Vec<usize>,
    finished: Vec<O>,
}

impl<'r, O: Operation> Flight<'r, O> {
    fn new(ring: &'r mut Ring, depth: usize) -> Self {
        let room = usize::try_from(ring.inner.params().sq_entries()).unwrap_or(1);
        let depth = depth.clamp(1, room);
        Self {
            ring,
            slots: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            finished: Vec::with_capacity(depth),
        }
    }

    fn has_room(&self) -> bool {
        self.finished.len() < self.free.len()
    }

    fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len() && self.finished.is_empty()
    }

    fn start(&mut self, mut operation: O) {
        if self.ring.broken {
            operation.plainly();
            self.finished.push(operation);
        } else if let Some(slot) = self.free.pop() {
            self.slots[slot] = Some(operation);
            self.push(slot);
        }
    }

    /// Queues an entry for the operation in a slot.
    #[allow(unsafe_code)]
    fn push(&mut self, slot: usize) {
        let Some(operation) = &mut self.slots[slot] else {
            return;
        };
        let entry = operation.entry().user_data(slot as u64);
        // SAFETY: the descriptor and every address of the entry belong to the operation (`entry`), which
        // stays in its slot until `reap` has seen the kernel's answer or the kernel is known never to
        // look at the entry (`give_up`). `drop` waits for the same.
        let pushed = unsafe { self.ring.inner.submission().push(&entry) };
        // One entry per slot, and no more slots than the queue has places.
        assert!(pushed.is_ok(), "the queue has a place for every slot");
    }

    /// How many operations the kernel has taken and not answered.
    fn taken(&mut self) -> usize {
        let queued = self.ring.inner.submission().len();
        self.slots.len() - self.free.len() - queued
    }

    /// Hands over what is queued and takes the answers, at least one.
    fn wait(&mut self) {
        if self.ring.broken || !self.finished.is_empty() {
            return;
        }
        match self.ring.inner.submit_and_wait(1) {
            Ok(_) => {}
            Err(error) if errno(&error) == Errno::INTR => {}
            // It has no memory for more now (or will never have): answers make room.
            Err(_) if self.taken() > 0 => self.wait_only(),
            Err(_) => return self.give_up(),
        }
        self.reap();
    }

    /// Waits for an answer and hands nothing over.
    #[allow(unsafe_code)]
    fn wait_only(&mut self) {
        const GETEVENTS: u32 = 1;
        // SAFETY: no argument is passed, and nothing is submitted.
        let waited = unsafe {
            self.ring
                .inner
                .submitter()
                .enter::<()>(0, 1, GETEVENTS, None)
        };
        if let Err(error) = waited
            && !matches!(errno(&error), Errno::INTR | Errno::AGAIN | Errno::BUSY)
        {
            // The kernel may write into memory that we could never give back.
            std::process::abort();
        }
    }

    fn reap(&mut self) {
        let answers: Vec<(u64, i32)> = self
            .ring
            .inner
            .completion()
            .map(|answer| (answer.user_data(), answer.result()))
            .collect();
        for (slot, result) in answers {
            let Some(slot) = usize::try_from(slot).ok().filter(|&s| s < self.slots.len()) else {
                continue;
            };
            let Some(operation) = &mut self.slots[slot] else {
                continue;
            };
            if operation.answer(result) {
                self.push(slot);
            } else {
                self.finished.extend(self.slots[slot].take());
                self.free.push(slot);
            }
        }
    }

    /// The kernel has nothing and takes nothing: the queued entries are never looked at, since the ring
    /// is not entered again.
    fn give_up(&mut self) {
        self.ring.broken = true;
        for slot in 0..self.slots.len() {
            if let Some(mut operation) = self.slots[slot].take() {
                operation.plainly();
                self.finished.push(operation);
                self.free.push(slot);
            }
        }
    }
}

impl<O: Operation> Drop for Flight<'_, O> {
    fn drop(&mut self) {
        // Only when `work` panicked is there anything left.
        let left = self.slots.len() - self.free.len();
        if left == 0 || self.ring.broken {
            return;
        }
        self.ring.broken = true;
        let mut taken = self.taken();
        while taken > 0 {
            self.wait_only();
            taken -= self.ring.inner.completion().count();
        }
    }
}

/// The errors of the ring calls themselves.
fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// The number in a negative answer.
fn failure(result: i32) -> Errno {
    Errno::from_raw_os_error(result.saturating_neg())
}

/// A read of a file into memory that it borrows or owns.
#[derive(Debug)]
pub struct Read<'a, T> {
    /// The file.
    pub file: BorrowedFd<'a>,
    /// Where in the file.
    pub offset: u64,
    /// Where to.
    pub buffer: Buffer<'a>,
    /// How many bytes are wanted; the buffer may have room for more (a direct read moves whole pages).
    pub wanted: usize,
    /// What the caller knows it by.
    pub tag: T,
    /// How many bytes came; fewer than wanted at the end of the file or after an error.
    pub got: usize,
    /// Why it ended early.
    pub error: Option<Errno>,
    /// One answer moves at most this much.
    most: usize,
}

impl<'a, T> Read<'a, T> {
    /// A read of `wanted` bytes from `offset` on.
    pub fn new(
        file: BorrowedFd<'a>,
        offset: u64,
        mut buffer: Buffer<'a>,
        wanted: usize,
        tag: T,
    ) -> Self {
        let wanted = wanted.min(buffer.bytes().len());
        Self {
            file,
            offset,
            buffer,
            wanted,
            tag,
            got: 0,
            error: None,
            most: MOST,
        }
    }

    fn rest(&mut self) -> (u64, &mut [u8]) {
        let rest = self.buffer.bytes();
        let end = rest.len().min(self.got.saturating_add(self.most));
        (self.offset + self.got as u64, &mut rest[self.got..end])
    }

    fn moved(&mut self, bytes: usize) -> bool {
        self.got += bytes;
        bytes > 0 && self.got < self.wanted
    }
}

impl<T> sealed::Operation for Read<'_, T> {
    fn entry(&mut self) -> squeue::Entry {
        let file = Fd(self.file.as_raw_fd());
        let (offset, rest) = self.rest();
        let len = u32::try_from(rest.len()).unwrap_or(u32::MAX);
        opcode::Read::new(file, rest.as_mut_ptr(), len)
            .offset(offset)
            .build()
    }

    fn answer(&mut self, result: i32) -> bool {
        match usize::try_from(result) {
            Ok(bytes) => return self.moved(bytes),
            Err(_) => match failure(result) {
                // Where a plain call would have waited or gone on.
                Errno::INTR | Errno::AGAIN | Errno::CANCELED => self.plainly(),
                errno => self.error = Some(errno),
            },
        }
        false
    }

    fn plainly(&mut self) {
        loop {
            let file = self.file;
            let (offset, rest) = self.rest();
            match retry_on_intr(|| pread(file, &mut *rest, offset)) {
                Ok(bytes) if self.moved(bytes) => {}
                Ok(_) => return,
                Err(errno) => {
                    self.error = Some(errno);
                    return;
                }
            }
        }
    }
}

/// Memory that a read fills.
#[derive(Debug)]
pub enum Buffer<'a> {
    /// The caller's.
    Borrowed(&'a mut [u8]),
    /// Its own.
    Owned(Aligned),
}

impl Buffer<'_> {
    /// Its bytes.
    fn bytes(&mut self) -> &mut [u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Owned(bytes) => bytes.bytes(),
        }
    }
}

/// Memory that starts at a multiple of [`Aligned::TO`] and stays there when it is moved.
#[derive(Debug, Default)]
pub struct Aligned {
    memory: Vec<u8>,
    len: usize,
}

impl Aligned {
    /// What direct reads need of addresses, offsets and lengths: a page, which every filesystem and
    /// device takes, and which no neighbour shares (a `fork` would otherwise lose what arrives late).
    pub const TO: usize = 4096;

    /// Makes it `len` bytes long; they hold anything.
    pub fn resize(&mut self, len: usize) {
        if self.memory.len() < len + Self::TO {
            self.memory = vec![0; len + Self::TO];
        }
        self.len = len;
    }

    /// How many bytes it keeps.
    pub fn capacity(&self) -> usize {
        self.memory.len()
    }

    /// Its bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        let start = self.memory.as_ptr().addr().wrapping_neg() % Self::TO;
        self.memory
            .get_mut(start..start + self.len)
            .unwrap_or_default()
    }
}

/// A `statx` of a name in a directory, of the entry itself if it is a link.
pub struct Stat<'a> {
    dir: BorrowedFd<'a>,
    name: CString,
    answer: Box<MaybeUninit<Statx>>,
    /// The caller's number for it.
    pub tag: usize,
    /// What it is and its size, once done.
    pub found: Io<(rustix::fs::FileType, u64)>,
}

impl<'a> Stat<'a> {
    /// Asks for one component beneath `dir`; none for a name that holds a zero byte.
    pub fn new(dir: BorrowedFd<'a>, name: &str, tag: usize) -> Option<Self> {
        Some(Self {
            dir,
            name: CString::new(name).ok()?,
            answer: Box::new(MaybeUninit::zeroed()),
            tag,
            found: Err(Errno::AGAIN),
        })
    }

    /// `AT_SYMLINK_NOFOLLOW`.
    const NOFOLLOW: i32 = 0x100;
    const MASK: StatxFlags = StatxFlags::TYPE.union(StatxFlags::SIZE);

    fn take(&mut self, statx: &Statx) {
        let kind = rustix::fs::FileType::from_raw_mode(statx.stx_mode.into());
        self.found = Ok((kind, statx.stx_size));
    }
}

// The kernel writes the whole of its structure, and knows the flag by this number.
const _: () = assert!(size_of::<Statx>() == 256);
const _: () = assert!(AtFlags::SYMLINK_NOFOLLOW.bits() == 0x100);

impl sealed::Operation for Stat<'_> {
    fn entry(&mut self) -> squeue::Entry {
        let at = self.answer.as_mut_ptr().cast();
        opcode::Statx::new(Fd(self.dir.as_raw_fd()), self.name.as_ptr(), at)
            .flags(Self::NOFOLLOW)
            .mask(Self::MASK.bits())
            .build()
    }

    #[allow(unsafe_code)]
    fn answer(&mut self, result: i32) -> bool {
        if result >= 0 {
            // SAFETY: the memory was zeroed, and every pattern of bits is a `Statx`, which is integers.
            let statx = unsafe { self.answer.assume_init_read() };
            self.take(&statx);
        } else {
            match failure(result) {
                Errno::INTR | Errno::AGAIN | Errno::CANCELED => self.plainly(),
                errno => self.found = Err(errno),
            }
        }
        false
    }

    fn plainly(&mut self) {
        let (dir, flags) = (self.dir, AtFlags::SYMLINK_NOFOLLOW);
        match retry_on_intr(|| rustix::fs::statx(dir, &*self.name, flags, Self::MASK)) {
            Ok(statx) => self.take(&statx),
            Err(errno) => self.found = Err(errno),
        }
    }
}

#[cfg(test)]
mod tests;
