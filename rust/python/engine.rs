//! `engine_counts`, `try_uring`: what reads here, and what this process has counted.

use std::sync::atomic::Ordering;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::error;
use super::run::{Work, detached};
use crate::gather::{COUNTS, Engine, uring_facts};

pub(super) fn parse(engine: &str) -> PyResult<Engine> {
    match engine {
        "auto" => Ok(Engine::Auto),
        "threads" => Ok(Engine::Threads),
        "uring" => Ok(Engine::Uring),
        other => {
            let why = format!("engine is {other:?}, not one of \"auto\", \"threads\", \"uring\"");
            Err(PyValueError::new_err(why))
        }
    }
}

/// What this process has read, by the names of `Counts`.
#[pyfunction]
pub(super) fn engine_counts(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let counts = PyDict::new(py);
    for (name, counter) in [
        ("threads", &COUNTS.threads),
        ("uring", &COUNTS.uring),
        ("blocked", &COUNTS.blocked),
        ("direct", &COUNTS.direct),
        ("refused", &COUNTS.refused),
    ] {
        counts.set_item(name, counter.load(Ordering::Relaxed))?;
    }
    Ok(counts)
}

/// Makes a ring: how its completions are delivered, or the `OSError` that says why there is none.
#[pyfunction]
pub(super) fn try_uring(py: Python<'_>) -> PyResult<&'static str> {
    let facts = detached(py, Work::items(1), |_| uring_facts())?.map_err(error::raise)?;
    Ok(facts.completions)
}
