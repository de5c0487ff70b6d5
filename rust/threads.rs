//! Independent blocking operations on scoped threads: nothing outlives the call, nothing to break
//! after a fork.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Threads for calls that wait for a disk or a server rather than for a core.
pub const IO_THREADS: usize = 16;

/// Calls `f` for every item on up to `threads` threads, the caller's among them; results in order.
///
/// A thread that cannot be started is done without; a panic of `f` is passed on.
pub fn map<T: Sync, R: Send>(items: &[T], threads: usize, f: impl Fn(&T) -> R + Sync) -> Vec<R> {
    if items.len() <= 1 || threads <= 1 {
        return items.iter().map(f).collect();
    }
    let cursor = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let index = cursor.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else {
                return done;
            };
            done.push((index, f(item)));
        }
    };
    let mut results: Vec<Option<R>> = items.iter().map(|_| None).collect();
    thread::scope(|scope| {
        let helpers: Vec<_> = (1..threads.min(items.len()))
            .map_while(|_| thread::Builder::new().spawn_scoped(scope, work).ok())
            .collect();
        let mut parts = vec![work()];
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
        .map(|result| result.expect("the cursor visits every item"))
        .collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn map_keeps_order() {
        // Promise: one result per item, in order, whatever the number of threads.
        let items: Vec<usize> = (0..1000).collect();
        for threads in [0, 1, 3, 64] {
            let doubled = super::map(&items, threads, |item| item * 2);
            assert_eq!(
                doubled,
                items.iter().map(|item| item * 2).collect::<Vec<_>>()
            );
        }
        assert!(super::map(&[] as &[u8], 4, |item| *item).is_empty());
    }

    #[test]
    fn map_passes_a_panic_on() {
        // Promise: a panic in one item is the caller's panic, not a hang or a lost result.
        let caught = std::panic::catch_unwind(|| {
            super::map(&[1, 2, 3, 4], 3, |item| assert!(*item != 3, "three"))
        });
        assert!(caught.is_err());
    }
}
