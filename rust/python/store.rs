//! `Store`: the core's store over the real filesystem, and the pool of its results.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use super::error;
use super::run::{Work, detached};
use super::segments::argument;
use crate::format::{Header, TensorInfo};
use crate::fs::real::RealFs;
use crate::gather;
use crate::slab::Pool;
use crate::store::{self, StoreOptions};
use crate::sweep::Scanned;

/// Idle bytes that a store keeps for its next results.
const IDLE: usize = 2 << 30;

/// The core's store.
pub(super) type Core = store::Store<RealFs>;

/// A store directory, opened confined: no path from data leaves it, no symlink in it is followed.
#[pyclass(frozen, module = "prime_io._native")]
pub(super) struct Store {
    /// None once closed. Locked with the interpreter held, for one statement: a fork never freezes it.
    core: Mutex<Option<Arc<Core>>>,
    pool: Pool,
    engine: gather::Engine,
    root: String,
    uuid: String,
    run_id: String,
}

impl Store {
    pub(super) fn core(&self) -> PyResult<Arc<Core>> {
        let core = self
            .core
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        core.ok_or_else(|| PyValueError::new_err(format!("the store {:?} is closed", self.root)))
    }
}

// Python's arguments arrive as values.
#[allow(clippy::needless_pass_by_value)]
#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (
        root, *, create=true, owner=false, run_id="", group_writable=false, engine="auto"
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        root: &str,
        create: bool,
        owner: bool,
        run_id: &str,
        group_writable: bool,
        engine: &str,
    ) -> PyResult<Self> {
        let engine = super::engine::parse(engine)?;
        let options = StoreOptions {
            create,
            owner,
            run_id: run_id.into(),
            group_writable,
        };
        let core = detached(py, Work::items(1), |_| {
            gather::check(engine)?;
            Core::open_path(root, &options)
        })??;
        Ok(Self {
            pool: Pool::new(IDLE),
            engine,
            root: core.root().into(),
            uuid: core.uuid().into(),
            run_id: core.run_id().into(),
            core: Mutex::new(Some(Arc::new(core))),
        })
    }

    #[getter]
    fn root(&self) -> &str {
        &self.root
    }

    #[getter]
    fn uuid(&self) -> &str {
        &self.uuid
    }

    #[getter]
    fn run_id(&self) -> &str {
        &self.run_id
    }

    #[getter]
    fn owner(&self) -> bool {
        self.core().is_ok_and(|core| core.is_owner())
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let core = self
            .core
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        detached(py, Work::items(1), |_| drop(core))
    }

    #[pyo3(signature = (files, *, durable=false))]
    fn publish<'py>(
        &self,
        files: &Bound<'py, PyAny>,
        durable: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        super::publish::publish(files.py(), &*self.core()?, files, durable)
    }

    fn writer(&self, version: &Bound<'_, PyAny>) -> PyResult<super::writer::Writer> {
        let (py, version) = (version.py(), argument(version, "version")?);
        let core = self.core()?;
        Ok(detached(py, Work::items(1), |_| core.writer(version))??.into())
    }

    fn header<'py>(&self, py: Python<'py>, files: Vec<String>) -> PyResult<Bound<'py, PyList>> {
        let core = self.core()?;
        let found = detached(py, Work::items(files.len()), |_| core.header(&files))?;
        let wrap = |header: Header| describe(py, &header);
        PyList::new(py, error::results(py, found, wrap)?)
    }

    #[pyo3(signature = (requests, *, verify=false))]
    fn gather<'py>(
        &self,
        requests: &Bound<'py, PyAny>,
        verify: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let core = self.core()?;
        super::gather::gather(requests.py(), requests, verify, |requests, stop| {
            let (fs, dir, pool) = (core.fs(), core.dir(), &self.pool);
            gather::gather(
                &gather::Source {
                    fs,
                    dir,
                    pool,
                    stop,
                    verify,
                    engine: self.engine,
                },
                requests,
            )
        })
    }

    #[pyo3(signature = (asked, *, sizes=false, method="auto"))]
    fn probe<'py>(
        &self,
        py: Python<'py>,
        asked: &Bound<'py, PyList>,
        sizes: bool,
        method: &str,
    ) -> PyResult<super::probe::Columns<'py>> {
        super::probe::probe(py, &*self.core()?, asked, sizes, method)
    }

    fn reclaim<'py>(&self, py: Python<'py>, files: Vec<String>) -> PyResult<Bound<'py, PyList>> {
        let core = self.core()?;
        let done = detached(py, Work::items(files.len()), |_| core.reclaim(&files))??;
        let wrap = |freed: Option<u64>| {
            // -1: it was already gone.
            let freed = freed.map_or(-1, |bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
            Ok(freed.into_pyobject(py)?.into_any())
        };
        PyList::new(py, error::results(py, done, wrap)?)
    }

    #[pyo3(signature = (pins, files, *, copy=false, dry_run=false))]
    fn link_back<'py>(
        &self,
        py: Python<'py>,
        pins: &str,
        files: Vec<super::link_back::Given<'py>>,
        copy: bool,
        dry_run: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        super::link_back::link_back(py, &*self.core()?, pins, files, copy, dry_run)
    }

    fn scan(&self, py: Python<'_>) -> PyResult<Vec<(String, u64, i128, &'static str)>> {
        let core = self.core()?;
        let found = detached(py, Work::UNKNOWN, |_| core.scan())??;
        let wrap = |one: Scanned| (one.file, one.size, one.mtime_ns, one.found.word());
        Ok(found.into_iter().map(wrap).collect())
    }

    fn versions(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        let core = self.core()?;
        Ok(detached(py, Work::items(1), |_| core.versions())??)
    }

    fn retire(&self, py: Python<'_>, version: &Bound<'_, PyAny>) -> PyResult<bool> {
        let (core, version) = (self.core()?, argument(version, "version")?);
        Ok(detached(py, Work::items(1), |_| core.retire(version))??)
    }

    fn empty_trash(&self, py: Python<'_>) -> PyResult<u64> {
        let core = self.core()?;
        Ok(detached(py, Work::UNKNOWN, |_| core.empty_trash())??)
    }

    fn sync<'py>(&self, py: Python<'py>, files: Vec<String>) -> PyResult<Bound<'py, PyList>> {
        let core = self.core()?;
        let done = detached(py, Work::items(files.len()), |_| core.sync(&files))?;
        PyList::new(
            py,
            error::results(py, done, |()| Ok(py.None().into_bound(py)))?,
        )
    }
}

/// (file size, [(name, dtype, full shape, offset from byte 0, bytes, checksum or "")], metadata).
fn describe<'py>(py: Python<'py>, header: &Header) -> PyResult<Bound<'py, PyAny>> {
    let one = |tensor: &TensorInfo| {
        let shape = PyTuple::new(py, &tensor.shape)?;
        let checksum = header.checksum(&tensor.name);
        let dtype = tensor.dtype.numpy();
        (
            &tensor.name,
            dtype,
            shape,
            tensor.offset,
            tensor.len,
            checksum,
        )
            .into_pyobject(py)
    };
    let tensors: PyResult<Vec<_>> = header.tensors.iter().map(one).collect();
    Ok((header.size, tensors?, &header.metadata)
        .into_pyobject(py)?
        .into_any())
}
