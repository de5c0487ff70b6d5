//! Errors of the core as Python exceptions.

use pyo3::exceptions::{PyBaseException, PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::error::{Error, Kind};

pyo3::create_exception!(
    prime_io._native,
    CorruptPayloadError,
    PyValueError,
    "The bytes on disk are not those that were written: torn, short, edited, or another file's."
);

/// `OSError(errno, message, path)`, out of which Python makes the right subclass; `ValueError`;
/// `CorruptPayloadError`.
pub(super) fn raise(error: Error) -> PyErr {
    match error.kind {
        Kind::Invalid(_) => PyValueError::new_err(error.to_string()),
        Kind::Corrupt(_) => CorruptPayloadError::new_err(error.to_string()),
        Kind::Os { errno, .. } => {
            // Python's text shows number and path itself.
            let path = error.path.clone();
            let text = Error {
                path: String::new(),
                ..error
            }
            .to_string();
            let text = text.replace(&format!(" (os error {})", errno.raw_os_error()), "");
            if path.is_empty() {
                PyOSError::new_err((errno.raw_os_error(), text))
            } else {
                PyOSError::new_err((errno.raw_os_error(), text, path))
            }
        }
    }
}

/// The exception as a value, for the results of a batch.
pub(super) fn instance(py: Python<'_>, error: PyErr) -> Py<PyBaseException> {
    error.into_value(py)
}

/// One object per result: the wrapped value, or the exception.
pub(super) fn results<'py, T, E>(
    py: Python<'py>,
    results: impl IntoIterator<Item = Result<T, E>>,
    mut wrap: impl FnMut(T) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Vec<Bound<'py, PyAny>>>
where
    E: Into<PyErr>,
{
    let one = |result: Result<T, E>| match result {
        Ok(value) => wrap(value),
        Err(error) => Ok(instance(py, error.into()).into_bound(py).into_any()),
    };
    results.into_iter().map(one).collect()
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        raise(error)
    }
}
