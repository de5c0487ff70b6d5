//! The Python extension: every function converts its arguments, detaches, and wraps the result.

mod buffer;
mod commit;
mod engine;
mod error;
mod gather;
mod link_back;
mod probe;
mod publish;
mod root;
mod run;
mod segments;
mod store;
mod writer;

use pyo3::prelude::*;

use buffer::Input;
use run::{Work, detached};

/// The native engine. Private: `prime_io.store`, `prime_io.checkpoint` and `prime_io.lineage` are its
/// users.
#[pymodule]
mod _native {
    use super::{PyModule, PyResult, Python};
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::buffer::Slab;
    #[pymodule_export]
    use super::commit::Commit;
    #[pymodule_export]
    use super::engine::{engine_counts, try_uring};
    #[pymodule_export]
    use super::root::Root;
    #[pymodule_export]
    use super::store::Store;
    #[pymodule_export]
    use super::writer::Writer;
    #[pymodule_export]
    use super::{owner_is_dead, temporary_name, xxh3};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let py: Python<'_> = module.py();
        module.add(
            "CorruptPayloadError",
            py.get_type::<super::error::CorruptPayloadError>(),
        )
    }
}

/// A fresh `.tmp-<bootid8>-<pid>-<starttime>-<rand>`.
#[pyfunction]
fn temporary_name(py: Python<'_>) -> PyResult<String> {
    detached(py, Work::items(1), |_| crate::names::temporary_name())
}

/// Whether the writer of a temporary (or trash) of that name is provably gone.
#[pyfunction]
fn owner_is_dead(py: Python<'_>, temporary: &str) -> PyResult<bool> {
    detached(py, Work::items(1), |_| {
        crate::names::owner_is_dead(temporary)
    })
}

/// XXH3-64 as 16 hex digits.
#[pyfunction]
fn xxh3(py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<String> {
    let data = Input::get(data, "data")?;
    let bytes = data.bytes();
    detached(py, Work::bytes(bytes.len()), |_| {
        crate::format::xxh3_hex(bytes)
    })
}
