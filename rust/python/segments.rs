//! Segments and other claims from Python objects.

use std::sync::Arc;

use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use crate::error::Error;
use crate::gather::Segment;

/// Reads the segments of a request. What one has in common with the one before it is shared with it.
#[derive(Default)]
pub(super) struct Segments {
    last: Segment,
    index: usize,
}

impl Segments {
    /// Reads one segment, any object with the attributes; what is wrong is a `ValueError` that names index
    /// and attribute, because segments come from other machines.
    pub(super) fn next(&mut self, object: &Bound<'_, PyAny>) -> PyResult<Segment> {
        let index = self.index;
        let wrong = |name: &str, why: String| {
            PyErr::from(Error::invalid(
                "gather",
                "",
                format!("segment {index}: {name} {why}"),
            ))
        };
        let py = object.py();
        let text = |name: &Bound<'_, PyString>, last: &Arc<str>| -> PyResult<Arc<str>> {
            let value = object.getattr(name)?;
            let text = value
                .cast::<PyString>()
                .ok()
                .and_then(|text| text.to_str().ok())
                .ok_or_else(|| wrong(&name.to_string(), "is not a string".into()))?;
            Ok(if **last == *text {
                Arc::clone(last)
            } else {
                text.into()
            })
        };
        let number = |name: &Bound<'_, PyString>| -> PyResult<u64> {
            unsigned(&object.getattr(name)?).map_err(|why| wrong(&name.to_string(), why))
        };
        let sizes = |last: &Arc<[u64]>| -> PyResult<Arc<[u64]>> {
            let shape = object.getattr(intern!(py, "shape"))?;
            let shape = dims(&shape).map_err(|why| wrong("shape", why))?;
            Ok(if **last == *shape {
                Arc::clone(last)
            } else {
                shape.into()
            })
        };
        let last = &self.last;
        self.last = Segment {
            file: text(intern!(py, "file"), &last.file)?,
            offset: number(intern!(py, "offset"))?,
            pos: number(intern!(py, "pos"))?,
            rows: number(intern!(py, "rows"))?,
            dtype: text(intern!(py, "dtype"), &last.dtype)?,
            shape: sizes(&last.shape)?,
            checksum: text(intern!(py, "checksum"), &last.checksum)?,
        };
        self.index += 1;
        Ok(self.last.clone())
    }
}

/// A shape: any sequence of sizes.
pub(super) fn dims(object: &Bound<'_, PyAny>) -> Result<Vec<u64>, String> {
    let not_a_shape = || "is not a tuple of sizes".to_string();
    if let Ok(tuple) = object.cast::<PyTuple>() {
        return tuple.iter().map(|dim| unsigned(&dim)).collect();
    }
    let dims = object.try_iter().map_err(|_| not_a_shape())?;
    dims.map(|dim| unsigned(&dim.map_err(|_| not_a_shape())?))
        .collect()
}

/// A size or position; why not otherwise.
pub(super) fn unsigned(object: &Bound<'_, PyAny>) -> Result<u64, String> {
    object.extract::<u64>().map_err(|error| {
        let py = object.py();
        if !error.is_instance_of::<PyOverflowError>(py) {
            return "is not an integer".into();
        }
        let negative = object.lt(0).unwrap_or(false);
        if negative {
            "is negative".into()
        } else {
            "is larger than 64 bits".into()
        }
    })
}

/// The same for an argument of the caller.
pub(super) fn argument(object: &Bound<'_, PyAny>, name: &str) -> PyResult<u64> {
    unsigned(object).map_err(|why| PyValueError::new_err(format!("{name} {why}")))
}
