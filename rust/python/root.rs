//! `Root`: small files of the run.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::buffer::Input;
use super::error;
use super::run::{Work, detached};
use super::segments::argument;
use crate::fs::real::RealFs;
use crate::root::{self, WriteOptions};

/// A directory of the run, for small files. Names are relative, confined, dots allowed only as `.tmp-*`
/// and `.trash-*` first components.
#[pyclass(frozen, module = "prime_io._native")]
pub(super) struct Root {
    core: root::Root<RealFs>,
}

#[pymethods]
impl Root {
    #[new]
    #[pyo3(signature = (path, *, create=false))]
    fn new(py: Python<'_>, path: &str, create: bool) -> PyResult<Self> {
        let core = detached(py, Work::items(1), |_| root::Root::open_path(path, create))??;
        Ok(Self { core })
    }

    #[pyo3(signature = (path, data, *, durable=true, exclusive=false))]
    fn write(
        &self,
        path: &str,
        data: &Bound<'_, PyAny>,
        durable: bool,
        exclusive: bool,
    ) -> PyResult<()> {
        let owner = Input::get(data, "data")?;
        let bytes = owner.bytes();
        let options = WriteOptions { durable, exclusive };
        let work = Work::bytes(bytes.len());
        Ok(detached(data.py(), work, |_| {
            self.core.write(path, bytes, options)
        })??)
    }

    #[pyo3(signature = (path, *, limit=None))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        path: &str,
        limit: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let limit = limit.map_or(Ok(1 << 30), |limit| argument(limit, "limit"))?;
        let bytes = detached(py, Work::UNKNOWN, |_| self.core.read(path, limit))??;
        Ok(PyBytes::new(py, &bytes))
    }

    #[pyo3(signature = (path=""))]
    fn list(&self, py: Python<'_>, path: &str) -> PyResult<Vec<(String, bool)>> {
        Ok(detached(py, Work::UNKNOWN, |_| self.core.list(path))??)
    }

    fn rename(&self, py: Python<'_>, source: &str, target: &str) -> PyResult<()> {
        Ok(detached(py, Work::items(1), |_| {
            self.core.rename(source, target)
        })??)
    }

    fn remove(&self, py: Python<'_>, path: &str) -> PyResult<()> {
        Ok(detached(py, Work::UNKNOWN, |_| self.core.remove(path))??)
    }

    #[allow(clippy::needless_pass_by_value)]
    fn hash<'py>(&self, py: Python<'py>, files: Vec<String>) -> PyResult<Bound<'py, PyList>> {
        let done = detached(py, Work::UNKNOWN, |_| self.core.hash(&files))?;
        PyList::new(
            py,
            error::results(py, done, |one| Ok(one.into_pyobject(py)?.into_any()))?,
        )
    }
}
