//! `Store.gather`: requests from Python, rows into their buffers or pooled slabs.

use std::sync::atomic::AtomicBool;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::buffer::{Input, Output, Slab};
use super::error;
use super::run::{Work, detached};
use super::segments::{Segments, argument, dims};
use crate::error::Result as CoreResult;
use crate::format::DType;
use crate::gather::{Fill, Filled, Request, sizes};

/// What Python passes: (segments, lo, hi, dtype, row shape, fill, out, valid).
type Given<'py> = (
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    String,
    Bound<'py, PyAny>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
);

/// A batch as the core wants it, except for the destinations, whose owners stay with the interpreter.
#[derive(Default)]
struct Batch {
    /// One per request: a core request without destinations, or what its segments lack.
    requests: Vec<PyResult<Request<'static>>>,
    /// For each request, whether it brought out and valid; they follow each other in `outputs`.
    brought: Vec<(bool, bool)>,
    outputs: Vec<Output>,
    work: Work,
}

impl Batch {
    fn add(&mut self, given: &Given<'_>) -> PyResult<()> {
        let (segments, lo, hi, dtype, shape, fill, out, valid) = given;
        let at = self.requests.len();
        let wrong = |why: String| PyValueError::new_err(format!("request {at}: {why}"));
        let (lo, hi) = (argument(lo, "lo")?, argument(hi, "hi")?);
        let dtype = DType::from_numpy(dtype).map_err(|error| wrong(error.to_string()))?;
        let shape = dims(shape).map_err(|why| wrong(format!("the row shape {why}")))?;
        let (len, rows) = sizes(lo, hi, dtype, &shape).map_err(|error| wrong(error.to_string()))?;
        let fill = match fill {
            Some(item) => Fill::Item(Input::get(item, "fill")?.bytes().to_vec()),
            None => Fill::Spread,
        };
        for (object, name, len) in [(out, "out", len), (valid, "valid", rows)] {
            if let Some(object) = object {
                self.outputs
                    .push(Output::get(object, &format!("request {at}: {name}"), len)?);
            }
        }
        let mut read = Segments::default();
        let segments: PyResult<Vec<_>> = segments
            .try_iter()?
            .map(|object| read.next(&object?))
            .collect();
        self.work.items += segments.as_ref().map_or(0, Vec::len);
        self.work.bytes = self.work.bytes.saturating_add(len);
        self.brought.push((out.is_some(), valid.is_some()));
        self.requests.push(segments.map(|segments| Request {
            segments,
            lo,
            hi,
            dtype,
            shape,
            fill,
            out: None,
            valid: None,
        }));
        Ok(())
    }
}

/// Converts, runs `work` detached, wraps.
pub(super) fn gather<'py>(
    py: Python<'py>,
    requests: &Bound<'py, PyAny>,
    verify: bool,
    work: impl FnOnce(Vec<Request<'_>>, &AtomicBool) -> Vec<CoreResult<Filled>> + Send,
) -> PyResult<Bound<'py, PyList>> {
    let mut batch = Batch::default();
    for given in requests.try_iter()? {
        batch.add(&given?.extract()?)?;
    }
    let mut size = batch.work;
    if verify {
        // The blocks around what is read.
        size.bytes = size.bytes.saturating_add(size.items << 20);
    }
    let mut outputs = Output::disjoint(&mut batch.outputs)?.into_iter();
    let mut ready = Vec::new();
    let mut results: Vec<Option<PyErr>> = Vec::new();
    for (request, (out, valid)) in batch.requests.into_iter().zip(batch.brought) {
        let out = if out { outputs.next() } else { None };
        let valid = if valid { outputs.next() } else { None };
        match request {
            Ok(request) => {
                ready.push(Request {
                    out,
                    valid,
                    ..request
                });
                results.push(None);
            }
            Err(error) => results.push(Some(error)),
        }
    }
    let mut done = detached(py, size, |stop| work(ready, stop))?.into_iter();
    let results = results.into_iter().map(|wrong| match wrong {
        Some(error) => Err(error),
        None => done
            .next()
            .expect("one result per request")
            .map_err(error::raise),
    });
    let list = error::results(py, results, |filled| {
        let slab = |memory: Option<_>| {
            memory
                .map(|memory| Py::new(py, Slab::from(memory)))
                .transpose()
        };
        Ok((slab(filled.out)?, slab(filled.valid)?)
            .into_pyobject(py)?
            .into_any())
    })?;
    PyList::new(py, list)
}
