//! `Commit`: one checkpoint component on its way.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyList;

use super::buffer::Input;
use super::error;
use super::run::{Work, detached};
use super::segments::argument;
use super::store::Store;
use crate::commit;
use crate::fs::real::RealFs;
use crate::pin::Pinned;

/// One checkpoint component on its way to `<checkpoints>/step_<step>/<component>`.
///
/// Built in a temporary sibling; nothing is visible before `finish` returns or the machine dies in it.
#[pyclass(frozen, module = "prime_io._native")]
pub(super) struct Commit {
    /// Locked only without the interpreter: calls of several threads take turns.
    core: Mutex<commit::Commit<RealFs>>,
}

impl Commit {
    fn core(&self) -> MutexGuard<'_, commit::Commit<RealFs>> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// Python's arguments arrive as values.
#[allow(clippy::needless_pass_by_value)]
#[pymethods]
impl Commit {
    #[new]
    #[pyo3(signature = (checkpoints, step, component, *, adopt=None))]
    fn new(
        checkpoints: &str,
        step: &Bound<'_, PyAny>,
        component: &str,
        adopt: Option<&str>,
    ) -> PyResult<Self> {
        let (py, step) = (step.py(), argument(step, "step")?);
        let begin = || commit::Commit::begin_path(checkpoints, step, component, adopt);
        let core = detached(py, Work::items(1), |_| begin())??;
        Ok(Self {
            core: Mutex::new(core),
        })
    }

    #[pyo3(signature = (store, files, *, copy=false))]
    fn pin<'py>(
        &self,
        py: Python<'py>,
        store: &Bound<'py, Store>,
        files: Vec<String>,
        copy: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let store = store.get().core()?;
        let done = detached(py, Work::UNKNOWN, |_| self.core().pin(&store, &files, copy))?;
        let wrap =
            |(size, how): (u64, Pinned)| Ok((size, how.word()).into_pyobject(py)?.into_any());
        PyList::new(py, error::results(py, done, wrap)?)
    }

    fn write(&self, name: &str, data: &Bound<'_, PyAny>) -> PyResult<(u64, String)> {
        let owner = Input::get(data, "data")?;
        let bytes = owner.bytes();
        let work = Work::bytes(bytes.len());
        Ok(detached(data.py(), work, |_| {
            self.core().write(name, bytes)
        })??)
    }

    fn files(&self, py: Python<'_>) -> PyResult<Vec<(String, u64, String)>> {
        Ok(detached(py, Work::UNKNOWN, |_| self.core().files())??)
    }

    fn finish(&self, manifest: &Bound<'_, PyAny>) -> PyResult<()> {
        let owner = Input::get(manifest, "manifest")?;
        let bytes = owner.bytes();
        Ok(detached(manifest.py(), Work::UNKNOWN, |_| {
            self.core().finish(bytes)
        })??)
    }

    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, Work::UNKNOWN, |_| self.core().abort())
    }
}
