//! Memory shared with Python: buffers that callers bring, and slabs that they get.

use std::ffi::c_int;
use std::ptr::NonNull;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::slab;

/// Bytes that a caller brings. The owner stays outside the detached closure: dropping it needs the
/// interpreter.
pub(super) struct Input(PyUntypedBuffer);

impl Input {
    pub(super) fn get(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object)?;
        if buffer.is_c_contiguous() {
            Ok(Self(buffer))
        } else {
            Err(PyValueError::new_err(format!(
                "{what} must be C-contiguous"
            )))
        }
    }

    #[allow(unsafe_code)]
    pub(super) fn bytes(&self) -> &[u8] {
        slice(&self.0).map_or(&[], |bytes| {
            // SAFETY: the exporter keeps these bytes in place until the buffer is released, which
            // `&self` delays, and they are initialised. That no other thread of Python writes them
            // meanwhile is the caller's duty, as for `file.write`.
            unsafe { bytes.as_ref() }
        })
    }
}

/// Memory that a caller brings to be written.
pub(super) struct Output(PyUntypedBuffer);

impl Output {
    /// Refuses what cannot take exactly `len` bytes in order.
    pub(super) fn get(object: &Bound<'_, PyAny>, what: &str, len: usize) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object)?;
        let why = if buffer.readonly() {
            "is read-only".into()
        } else if !buffer.is_c_contiguous() {
            "is not C-contiguous".into()
        } else if buffer.len_bytes() != len {
            format!(
                "has {} bytes, but {len} are to be written",
                buffer.len_bytes()
            )
        } else {
            return Ok(Self(buffer));
        };
        Err(PyValueError::new_err(format!("{what} {why}")))
    }

    /// All of them as slices, unless two share a byte.
    #[allow(unsafe_code)]
    pub(super) fn disjoint(outputs: &mut [Self]) -> PyResult<Vec<&mut [u8]>> {
        let mut spans: Vec<_> = outputs
            .iter()
            .filter_map(|output| slice(&output.0))
            .map(|bytes| (bytes.addr().get(), bytes.len()))
            .collect();
        spans.sort_unstable();
        if spans
            .windows(2)
            .any(|pair| pair[1].0 - pair[0].0 < pair[0].1)
        {
            return Err(PyValueError::new_err(
                "two destinations of a batch share memory",
            ));
        }
        let one = |output: &'_ mut Self| -> &mut [u8] {
            slice(&output.0).map_or(&mut [], |mut bytes| {
                // SAFETY: the exporter keeps these bytes in place until the buffer is released, which
                // the borrow of the owner delays; they are writable (`get`), initialised, and no
                // other slice of this batch has one of them (checked above). That no other thread of
                // Python uses them meanwhile is the caller's duty, as for `file.readinto`.
                unsafe { bytes.as_mut() }
            })
        };
        Ok(outputs.iter_mut().map(one).collect())
    }
}

/// The memory of a buffer; none if it is empty, whose pointer may be anything.
fn slice(buffer: &PyUntypedBuffer) -> Option<NonNull<[u8]>> {
    let start = NonNull::new(buffer.buf_ptr().cast::<u8>())?;
    let len = buffer.len_bytes();
    (len > 0).then(|| NonNull::slice_from_raw_parts(start, len))
}

/// Pooled memory, exposed through the buffer protocol (bytes, writable). It goes back to its pool when
/// the last view of it dies.
#[pyclass(frozen, module = "prime_io._native")]
pub(super) struct Slab {
    start: NonNull<u8>,
    len: usize,
    /// Never touched again before drop: the bytes belong to the views.
    _memory: slab::Slab,
}

// SAFETY: Rust reads and writes nothing through `start`; views do, under the rules of their exporter.
#[allow(unsafe_code)]
unsafe impl Send for Slab {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Slab {}

impl From<slab::Slab> for Slab {
    fn from(mut memory: slab::Slab) -> Self {
        let len = memory.len();
        // The bytes of a slab do not move with it: they are mapped or in the heap.
        let start = NonNull::from(&mut *memory).cast();
        Self {
            start,
            len,
            _memory: memory,
        }
    }
}

#[pymethods]
impl Slab {
    fn __len__(&self) -> usize {
        self.len
    }

    #[allow(unsafe_code, clippy::needless_pass_by_value)]
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        let start = this.start.as_ptr().cast();
        let len = isize::try_from(this.len)?;
        // SAFETY: `view` comes from the interpreter. It gets a strong reference to the slab, so that
        // the `len` bytes at `start` live as long as the view.
        let code = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, len, 0, flags) };
        if code == 0 {
            Ok(())
        } else {
            Err(PyErr::fetch(slf.py()))
        }
    }
}
