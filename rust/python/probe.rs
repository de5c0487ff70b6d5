//! `Store.probe`: names and segments from Python, three columns of answers as bytes.

use std::thread;
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyList, PyString, PyTuple};

use super::run::{Work, detached};
use super::store::Core;
use crate::format::DType;
use crate::probe::{Answer, Method};

/// (present u8[n], size i64[n], errno i32[n]).
pub(super) type Columns<'py> = (
    Bound<'py, PyByteArray>,
    Bound<'py, PyByteArray>,
    Bound<'py, PyByteArray>,
);

/// How long arguments are read before another thread of the interpreter, an event loop, gets its turn.
const TURN: Duration = Duration::from_millis(1);
const PAUSE: Duration = Duration::from_micros(100);

pub(super) fn probe<'py>(
    py: Python<'py>,
    core: &Core,
    asked: &Bound<'py, PyList>,
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
    let asked = Asked::of(asked)?;
    let work = Work::items(asked.ends.len());
    let (present, size, errno) = detached(py, work, |_| {
        let answers = core.probe(&asked.files(), asked.needs(), sizes, method);
        columns(&answers)
    })?;
    let array = |bytes: &[u8]| PyByteArray::new(py, bytes);
    Ok((array(&present), array(&size), array(&errno)))
}

fn columns(answers: &[Answer]) -> (Vec<u8>, Vec<u8>, Vec<u8>) {
    let mut size = Vec::with_capacity(answers.len() * 8);
    let mut errno = Vec::with_capacity(answers.len() * 4);
    for answer in answers {
        size.extend_from_slice(&answer.size.to_ne_bytes());
        errno.extend_from_slice(&answer.errno.to_ne_bytes());
    }
    let present = answers.iter().map(|answer| u8::from(answer.present));
    (present.collect(), size, errno)
}

/// What was asked for, as one text and numbers.
#[derive(Default)]
struct Asked {
    text: String,
    /// Where each name ends in the text. A segment that cannot be has the name "", which is never there.
    ends: Vec<usize>,
    /// How long each file must be.
    needs: Vec<u64>,
    /// Whether any need was stated.
    needy: bool,
}

impl Asked {
    fn of(list: &Bound<'_, PyList>) -> PyResult<Self> {
        let py = list.py();
        let mut asked = Self::default();
        let mut turn = Instant::now();
        for at in 0..list.len() {
            // It may have become shorter while others had their turn.
            let item = list.get_item(at)?;
            if let Ok(name) = item.cast::<PyString>() {
                asked.push(name.to_str().unwrap_or(""), 0);
            } else {
                asked.needy = true;
                match claim(&item)? {
                    Some((file, need)) => asked.push(file.to_str().unwrap_or(""), need),
                    None => asked.push("", 0),
                }
            }
            if at % 256 == 255 && turn.elapsed() > TURN {
                py.detach(|| thread::sleep(PAUSE));
                turn = Instant::now();
            }
        }
        Ok(asked)
    }

    fn push(&mut self, name: &str, need: u64) {
        self.text.push_str(name);
        self.ends.push(self.text.len());
        self.needs.push(need);
    }

    fn files(&self) -> Vec<&str> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let ranges = starts.zip(&self.ends);
        ranges.map(|(start, &end)| &self.text[start..end]).collect()
    }

    fn needs(&self) -> Option<&[u64]> {
        self.needy.then_some(&self.needs)
    }
}

/// The file of a segment, and how long it must be; none if there can be no such segment.
fn claim<'py>(item: &Bound<'py, PyAny>) -> PyResult<Option<(Bound<'py, PyString>, u64)>> {
    let py = item.py();
    let names = [
        intern!(py, "file"),
        intern!(py, "offset"),
        intern!(py, "pos"),
        intern!(py, "rows"),
        intern!(py, "dtype"),
        intern!(py, "shape"),
    ];
    let mut values = Vec::with_capacity(names.len());
    for name in names {
        let value = item.getattr(name).map_err(|_| {
            let kind = item.get_type();
            PyTypeError::new_err(format!("{kind} is neither a file name nor a segment"))
        })?;
        values.push(value);
    }
    let end = || {
        let number = |at: usize| values[at].extract::<i64>().ok();
        let (offset, pos, rows) = (number(1)?, number(2)?, number(3)?);
        let dtype = DType::from_numpy(values[4].cast::<PyString>().ok()?.to_str().ok()?).ok()?;
        let dims = values[5].cast::<PyTuple>().ok()?.iter();
        let dims: Option<Vec<u64>> = dims.map(|dim| dim.extract().ok()).collect();
        dtype.item_size()?;
        let width = i64::try_from(dtype.tensor_bytes(&dims?)?).ok()?;
        let end = rows.checked_mul(width)?.checked_add(offset)?;
        pos.checked_add(rows)?;
        let fits = offset >= 0 && rows >= 0 && pos > i64::MIN;
        u64::try_from(end).ok().filter(|_| fits)
    };
    let claim = end();
    let file = values.swap_remove(0).cast_into::<PyString>();
    Ok(claim.zip(file.ok()).map(|(end, file)| (file, end)))
}
