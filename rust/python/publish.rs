//! `Store.publish`: tensors from Python buffers into payload files.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::buffer::Input;
use super::error;
use super::run::{Work, detached};
use super::segments::{argument, dims};
use super::store::Core;
use crate::format::DType;
use crate::publish::{FileToWrite, Published, TensorToWrite};

/// A file as Python passes it, with the owners of its bytes.
struct Given {
    version: u64,
    tensors: Vec<Tensor>,
}

/// A tensor as Python passes it: (name, dtype, full shape, bytes).
pub(super) struct Tensor {
    name: String,
    dtype: DType,
    shape: Vec<u64>,
    data: Input,
}

impl Tensor {
    /// `file` says which of a batch it belongs to, for messages; may be empty.
    pub(super) fn get(file: &str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (name, dtype, shape, data): (String, String, Bound<'_, PyAny>, Bound<'_, PyAny>) =
            object.extract()?;
        let what = format!("{file}tensor {name:?}");
        let wrong = |why: String| PyValueError::new_err(format!("{what}: {why}"));
        let dtype = DType::from_numpy(&dtype).map_err(|error| wrong(error.to_string()))?;
        let shape = dims(&shape).map_err(|why| wrong(format!("its shape {why}")))?;
        let data = Input::get(&data, &what)?;
        Ok(Self {
            name,
            dtype,
            shape,
            data,
        })
    }

    pub(super) fn to_write(&self) -> TensorToWrite<'_> {
        let (dtype, shape) = (self.dtype, self.shape.clone());
        TensorToWrite {
            name: &self.name,
            dtype,
            shape,
            bytes: self.data.bytes(),
        }
    }
}

fn file(at: usize, object: &Bound<'_, PyAny>) -> PyResult<Given> {
    let (version, tensors): (Bound<'_, PyAny>, Bound<'_, PyAny>) = object.extract()?;
    let what = format!("file {at}, ");
    let tensors: PyResult<Vec<_>> = tensors
        .try_iter()?
        .map(|object| Tensor::get(&what, &object?))
        .collect();
    Ok(Given {
        version: argument(&version, &format!("file {at}: version"))?,
        tensors: tensors?,
    })
}

pub(super) fn publish<'py>(
    py: Python<'py>,
    core: &Core,
    files: &Bound<'py, PyAny>,
    durable: bool,
) -> PyResult<Bound<'py, PyList>> {
    let given: PyResult<Vec<_>> = files
        .try_iter()?
        .enumerate()
        .map(|(at, object)| file(at, &object?))
        .collect();
    let given = given?;
    let files: Vec<_> = given
        .iter()
        .map(|file| FileToWrite {
            version: file.version,
            tensors: file.tensors.iter().map(Tensor::to_write).collect(),
        })
        .collect();
    let all = files.iter().flat_map(|file| &file.tensors);
    let work = Work {
        items: files.len(),
        bytes: all.map(|tensor| tensor.bytes.len()).sum(),
    };
    let done = detached(py, work, |_| core.publish(&files, durable))?;
    let wrap = |done: Published| Ok((done.file, done.tensors).into_pyobject(py)?.into_any());
    PyList::new(py, error::results(py, done, wrap)?)
}
