//! Payload I/O for asynchronous RL post-training.
//!
//! ```text
//! publish   tensors            -> v<k>/<unique>.safetensors   temporary, written, one rename
//! writer    rows, turn by turn -> the same                    appended to a temporary, one rename
//! probe     names              -> present / size / errno      one directory read, or stats
//! gather    segments           -> the caller's memory         threads or io_uring, later segments win
//! commit    state + pins       -> step_<N>/<component>/       hard links, manifest fsynced last
//! reclaim   names nobody holds -> gone                        unlinkat, missing is fine
//! ```
//!
//! Everything is written against [`fs::Fs`], whose implementations are the real filesystem and a
//! simulated disk that can lose power. No Python outside `python/`.

pub mod commit;
pub mod error;
pub mod format;
pub mod fs;
pub mod gather;
pub mod link_back;
pub mod names;
pub mod pin;
pub mod probe;
pub mod publish;
#[cfg(feature = "python")]
mod python;
pub mod reclaim;
pub mod root;
pub mod slab;
pub mod store;
pub mod sweep;
pub mod threads;
pub mod uring;
pub mod writer;

pub use error::{Error, Result};
