//! Independent blocking operations on scoped threads: nothing outlives the call, nothing to break
//! after a fork.
//!
//! A call starts on its caller's thread alone. While work is left, a thread that finds that it mostly
//! waited (a disk, a server) brings in one more, up to the limit; one that found itself computing does
//! so only while there are fewer of them than cores. Warm work so leaves the other threads of the
//! process their turn, and slow storage is asked for many things at once after a few of its answers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// The most threads of a call that may wait for a disk or a server rather than for a core.
pub const IO_THREADS: usize = 16;

/// A thread judges its work after this long: some times what starting another one costs.
const JUDGE: Duration = Duration::from_micros(200);

/// Calls `f` for every item on up to `most` threads, the caller's among them; results in order.
///
/// A thread that cannot be started is done without; a panic of `f` is a panic of the call.
pub fn map<'a, T: Sync, R: Send>(
    items: &'a [T],
    most: usize,
    f: impl Fn(&'a T) -> R + Sync,
) -> Vec<R> {
    map_long(items, most, |item, _| f(item))
}

/// As [`map`], for items of many operations each: `f` is to call its second argument between them.
pub fn map_long<'a, T: Sync, R: Send>(
    items: &'a [T],
    most: usize,
    f: impl Fn(&'a T, &mut dyn FnMut()) -> R + Sync,
) -> Vec<R> {
    if items.len() <= 1 || most <= 1 {
        return items.iter().map(|item| f(item, &mut || ())).collect();
    }
    let crew = Crew {
        items,
        f,
        most: most.min(items.len()),
        cursor: AtomicUsize::new(0),
        size: AtomicUsize::new(1),
        done: Mutex::default(),
    };
    thread::scope(|scope| crew.work(scope));
    let done = crew
        .done
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    let mut results: Vec<Option<R>> = items.iter().map(|_| None).collect();
    for (index, result) in done.into_iter().flatten() {
        results[index] = Some(result);
    }
    results
        .into_iter()
        .map(|result| result.expect("the cursor visits every item"))
        .collect()
}

/// How many cores this process may use.
pub(crate) fn cores() -> usize {
    // Asking takes several system calls.
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| thread::available_parallelism().map_or(1, usize::from))
}

/// The threads of a call and what they share.
struct Crew<'a, T, R, F> {
    items: &'a [T],
    f: F,
    most: usize,
    cursor: AtomicUsize,
    size: AtomicUsize,
    /// (index, result), from each thread that is through.
    done: Mutex<Vec<Vec<(usize, R)>>>,
}

impl<'a, T: Sync, R: Send, F: Fn(&'a T, &mut dyn FnMut()) -> R + Sync> Crew<'a, T, R, F> {
    /// What each thread does.
    fn work<'scope>(&'scope self, scope: &'scope thread::Scope<'scope, '_>) {
        let mut watch = Watch::start();
        let mut judge = || {
            let Some(waited) = watch.judge() else { return };
            if self.cursor.load(Ordering::Relaxed) < self.items.len() && self.has_room(waited) {
                let more = thread::Builder::new().spawn_scoped(scope, || self.work(scope));
                if more.is_err() {
                    self.size.fetch_sub(1, Ordering::Relaxed);
                }
            }
        };
        let mut done = Vec::new();
        loop {
            let index = self.cursor.fetch_add(1, Ordering::Relaxed);
            let Some(item) = self.items.get(index) else {
                break;
            };
            done.push((index, (self.f)(item, &mut judge)));
            judge();
        }
        let mut all = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(done);
    }

    /// Whether one more may be brought in; counts it.
    fn has_room(&self, waited: bool) -> bool {
        let most = if waited {
            self.most
        } else {
            self.most.min(cores())
        };
        let more = |size: usize| (size < most).then_some(size + 1);
        self.size
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .is_ok()
    }
}

/// What a thread did since it was last asked.
struct Watch {
    wall: Instant,
    cpu: Duration,
}

impl Watch {
    fn start() -> Self {
        Self {
            wall: Instant::now(),
            cpu: cpu_time(),
        }
    }

    /// Whether it mostly waited; none if it is too early to say.
    fn judge(&mut self) -> Option<bool> {
        let wall = self.wall.elapsed();
        if wall < JUDGE {
            return None;
        }
        let now = Self::start();
        let busy = now.cpu.saturating_sub(self.cpu);
        *self = now;
        Some(busy < wall / 2)
    }
}

/// The time that this thread has spent on a core.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn map_keeps_order() {
        // Promise: one result per item, in order, whatever the number of threads and their work.
        let items: Vec<usize> = (0..1000).collect();
        for most in [0, 1, 3, 64] {
            let doubled = map(&items, most, |item| {
                if item % 100 == 0 {
                    thread::sleep(Duration::from_micros(300));
                }
                item * 2
            });
            let right: Vec<_> = items.iter().map(|item| item * 2).collect();
            assert_eq!(doubled, right);
        }
        assert!(map(&[] as &[u8], 4, |item| *item).is_empty());
    }

    #[test]
    fn waiting_brings_in_threads_and_computing_only_cores() {
        // Promise: up to the limit for what waits, inside long items too; no more than cores for what
        // computes.
        let most_at_once = |most, each: &(dyn Fn(&mut dyn FnMut()) + Sync)| {
            let (now, top) = (AtomicUsize::new(0), AtomicUsize::new(0));
            map_long(&[(); 64], most, |(), judge| {
                let here = now.fetch_add(1, Ordering::Relaxed) + 1;
                top.fetch_max(here, Ordering::Relaxed);
                each(judge);
                now.fetch_sub(1, Ordering::Relaxed);
            });
            top.into_inner()
        };
        let wait = |judge: &mut dyn FnMut()| {
            for _ in 0..10 {
                thread::sleep(Duration::from_millis(1));
                judge();
            }
        };
        assert_eq!(most_at_once(7, &wait), 7);
        assert_eq!(most_at_once(1, &wait), 1);
        let nothing = |_: &mut dyn FnMut()| ();
        assert_eq!(most_at_once(1, &nothing), 1);
        let crew = Crew {
            items: &[(); 64],
            f: |(): &(), _: &mut dyn FnMut()| (),
            most: cores() + 1,
            cursor: AtomicUsize::new(0),
            size: AtomicUsize::new(1),
            done: Mutex::default(),
        };
        let computing = (0..64).filter(|_| crew.has_room(false)).count();
        assert_eq!(computing, cores() - 1);
        assert!(crew.has_room(true) && !crew.has_room(true));
    }

    #[test]
    fn a_thread_knows_whether_it_waited() {
        // Promise: too early there is no judgement; sleeping is waiting; a busy loop is not, unless others
        // had the core.
        let mut watch = Watch::start();
        assert_eq!(watch.judge(), None);
        thread::sleep(Duration::from_millis(2));
        assert_eq!(watch.judge(), Some(true));
        let alone = (0..100).any(|_| {
            watch = Watch::start();
            let start = Instant::now();
            while start.elapsed() < JUDGE * 2 {}
            watch.judge() == Some(false)
        });
        assert!(alone, "a busy loop never counted as computing");
    }

    #[test]
    fn map_passes_a_panic_on() {
        // Promise: a panic in one item is the caller's panic, not a hang or a lost result.
        let caught = std::panic::catch_unwind(|| {
            map(&[1, 2, 3, 4], 3, |item| {
                thread::sleep(Duration::from_millis(1));
                assert!(*item != 3, "three");
            })
        });
        assert!(caught.is_err());
    }
}
