//! `Store.probe`: names from Python, three columns of answers as bytes.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

use super::run::{Work, detached};
use super::segments::argument;
use super::store::Core;
use crate::probe::{Answer, Method};

/// (present u8[n], size i64[n], errno i32[n]).
pub(super) type Columns<'py> = (
    Bound<'py, PyByteArray>,
    Bound<'py, PyByteArray>,
    Bound<'py, PyByteArray>,
);

pub(super) fn probe<'py>(
    py: Python<'py>,
    core: &Core,
    files: &[String],
    needs: Option<&[Bound<'py, PyAny>]>,
    sizes: bool,
    method: &str,
) -> PyResult<Columns<'py>> {
    let method = match method {
        "auto" => Method::Auto,
        "scan" => Method::Scan,
        "stat" => Method::Stat,
        "uring" => Method::Uring,
        other => {
            let why =
                format!("method is {other:?}, not one of \"auto\", \"scan\", \"stat\", \"uring\"");
            return Err(PyValueError::new_err(why));
        }
    };
    let need = |(at, need): (usize, &Bound<'py, PyAny>)| argument(need, &format!("needs[{at}]"));
    let needs: Option<Vec<u64>> = needs
        .map(|needs| needs.iter().enumerate().map(need).collect())
        .transpose()?;
    if let Some(needs) = needs.as_ref().filter(|needs| needs.len() != files.len()) {
        let why = format!("{} needs for {} files", needs.len(), files.len());
        return Err(PyValueError::new_err(why));
    }
    let work = Work::items(files.len());
    let answers = detached(py, work, |_| {
        core.probe(files, needs.as_deref(), sizes, method)
    })?;
    let column = |bytes: &dyn Fn(&Answer, &mut Vec<u8>)| {
        let mut column = Vec::with_capacity(answers.len() * 8);
        for answer in &answers {
            bytes(answer, &mut column);
        }
        PyByteArray::new(py, &column)
    };
    Ok((
        column(&|answer, to| to.push(u8::from(answer.present))),
        column(&|answer, to| to.extend(answer.size.to_ne_bytes())),
        column(&|answer, to| to.extend(answer.errno.to_ne_bytes())),
    ))
}
