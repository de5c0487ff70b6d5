//! The only door out of the interpreter.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use pyo3::prelude::*;

/// How often a waiting thread looks at signals.
const LOOK: Duration = Duration::from_millis(50);

/// How much a call will do, to choose whether it is worth a thread of its own.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Work {
    /// Files touched.
    pub(super) items: usize,
    /// Bytes moved.
    pub(super) bytes: usize,
}

impl Work {
    /// Nothing known about the size: a directory of any length.
    pub(super) const UNKNOWN: Self = Self {
        items: usize::MAX,
        bytes: 0,
    };

    pub(super) fn items(items: usize) -> Self {
        Self { items, bytes: 0 }
    }

    pub(super) fn bytes(bytes: usize) -> Self {
        Self { items: 1, bytes }
    }

    fn is_tiny(self) -> bool {
        self.items <= 16 && self.bytes <= 8 << 20
    }
}

/// Runs `work` without the interpreter. Work that may be long runs on a thread of its own while this one
/// looks at signals; when a handler raises, `work` is told to stop, waited for, and its result dropped.
pub(super) fn detached<T: Send>(
    py: Python<'_>,
    size: Work,
    work: impl FnOnce(&AtomicBool) -> T + Send,
) -> PyResult<T> {
    let stop = AtomicBool::new(false);
    if size.is_tiny() {
        return Ok(py.detach(|| work(&stop)));
    }
    let work = Mutex::new(Some(work));
    let run = || {
        work.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
            .map(|work| work(&stop))
    };
    let result = py.detach(|| {
        thread::scope(|scope| {
            let (alive, gone) = mpsc::channel::<()>();
            let on_thread = move || {
                let _alive = alive;
                run()
            };
            // Without a thread to spare, signals wait.
            let Ok(worker) = thread::Builder::new().spawn_scoped(scope, on_thread) else {
                return Ok(run());
            };
            let mut raised = Ok(());
            while gone.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                if raised.is_ok() {
                    raised = Python::try_attach(look).unwrap_or(Ok(()));
                    stop.store(raised.is_err(), Ordering::Relaxed);
                }
            }
            let done = worker
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            raised.map(|()| done)
        })
    })?;
    Ok(result.expect("the work is taken once"))
}

/// Runs the handlers of signals that have arrived; may raise what they raise.
fn look(py: Python<'_>) -> PyResult<()> {
    py.check_signals()
}
