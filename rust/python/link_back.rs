//! `Store.link_back`: pinned files get their names in the store again.

use pyo3::prelude::*;
use pyo3::types::PyList;

use super::error;
use super::run::{Work, detached};
use super::segments::argument;
use super::store::Core;
use crate::link_back::{LinkedBack, PinnedFile};

/// What Python passes: (file, size, checksums).
pub(super) type Given<'py> = (String, Bound<'py, PyAny>, Vec<String>);

pub(super) fn link_back<'py>(
    py: Python<'py>,
    core: &Core,
    pins: &str,
    files: Vec<Given<'py>>,
    copy: bool,
    dry_run: bool,
) -> PyResult<Bound<'py, PyList>> {
    let pinned = |(file, size, checksums): Given<'py>| {
        let size = argument(&size, &format!("the size of {file:?}"))?;
        Ok(PinnedFile {
            file,
            size,
            checksums,
        })
    };
    let files: PyResult<Vec<_>> = files.into_iter().map(pinned).collect();
    let files = files?;
    let done = detached(py, Work::items(files.len()), |_| {
        core.link_back_path(pins, &files, copy, dry_run)
    })??;
    let wrap = |how: LinkedBack| Ok(how.word().into_pyobject(py)?.into_any());
    PyList::new(py, error::results(py, done, wrap)?)
}
