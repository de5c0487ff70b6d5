//! `Writer`: a payload file that grows until it is closed.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;

use super::publish::Tensor;
use super::run::{Work, detached};
use crate::fs::real::RealFs;
use crate::publish::TensorToWrite;
use crate::writer::{self, Appended};

/// Writes payload files append by append. Nothing is visible before `close`, or before a full file made way
/// for the next.
#[pyclass(frozen, module = "prime_io._native")]
pub(super) struct Writer {
    /// Locked only without the interpreter: calls of several threads take turns.
    core: Mutex<writer::Writer<RealFs>>,
}

impl Writer {
    fn core(&self) -> MutexGuard<'_, writer::Writer<RealFs>> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl From<writer::Writer<RealFs>> for Writer {
    fn from(core: writer::Writer<RealFs>) -> Self {
        Self {
            core: Mutex::new(core),
        }
    }
}

#[pymethods]
impl Writer {
    fn append(&self, tensors: &Bound<'_, PyAny>) -> PyResult<Vec<(String, u64, u64, String)>> {
        let given: PyResult<Vec<_>> = tensors
            .try_iter()?
            .map(|object| Tensor::get("", &object?))
            .collect();
        let given = given?;
        let all: Vec<_> = given.iter().map(Tensor::to_write).collect();
        let work = Work {
            items: all.len(),
            bytes: all
                .iter()
                .map(|tensor: &TensorToWrite<'_>| tensor.bytes.len())
                .sum(),
        };
        let done = detached(tensors.py(), work, |_| self.core().append(&all))??;
        let wrap = |one: Appended| (one.file, one.offset, one.pos, one.checksum);
        Ok(done.into_iter().map(wrap).collect())
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        Ok(detached(py, Work::items(1), |_| self.core().close())??)
    }

    fn discard(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, Work::items(1), |_| self.core().discard())
    }
}
