//! One error type with one message style: operation, path, cause.

use std::fmt;

use rustix::io::Errno;

/// What went wrong, in which operation, on which path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// The operation as the user knows it: `"open"`, `"publish"`, `"fsync"`.
    pub op: &'static str,
    /// The path as the caller gave it, or relative to the root it belongs to; may be empty.
    pub path: String,
    /// The cause.
    pub kind: Kind,
}

/// The cause of an [`Error`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// The operating system refused. `hint` says what to do about it; may be empty.
    Os {
        /// The error number.
        errno: Errno,
        /// What the user can do, or "".
        hint: &'static str,
    },
    /// The caller's mistake: an argument that can never work.
    Invalid(String),
    /// The bytes on disk are not what they should be: short, torn, edited or of another file.
    Corrupt(String),
}

/// A result with the crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An operating system error.
    pub fn os(op: &'static str, path: impl Into<String>, errno: Errno) -> Self {
        Self {
            op,
            path: path.into(),
            kind: Kind::Os { errno, hint: "" },
        }
    }

    /// A mistake of the caller.
    pub fn invalid(op: &'static str, path: impl Into<String>, why: impl Into<String>) -> Self {
        Self {
            op,
            path: path.into(),
            kind: Kind::Invalid(why.into()),
        }
    }

    /// Bytes on disk that are not what they should be.
    pub fn corrupt(op: &'static str, path: impl Into<String>, why: impl Into<String>) -> Self {
        Self {
            op,
            path: path.into(),
            kind: Kind::Corrupt(why.into()),
        }
    }

    /// The same error with advice for the user (operating system errors only).
    #[must_use]
    pub fn with_hint(mut self, advice: &'static str) -> Self {
        if let Kind::Os { hint, .. } = &mut self.kind {
            *hint = advice;
        }
        self
    }

    /// The error number, if the operating system gave one.
    pub fn errno(&self) -> Option<Errno> {
        match self.kind {
            Kind::Os { errno, .. } => Some(errno),
            Kind::Invalid(_) | Kind::Corrupt(_) => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.op)?;
        if !self.path.is_empty() {
            write!(f, " {:?}", self.path)?;
        }
        match &self.kind {
            Kind::Os { errno, hint: "" } => write!(f, ": {errno}"),
            Kind::Os { errno, hint } => write!(f, ": {errno} ({hint})"),
            Kind::Invalid(why) | Kind::Corrupt(why) => write!(f, ": {why}"),
        }
    }
}

impl std::error::Error for Error {}

/// Attaches operation and path to the bare error number that [`crate::fs::Fs`] returns.
pub trait Context<T> {
    /// Names the operation and the path that failed.
    fn context(self, op: &'static str, path: &str) -> Result<T>;
}

impl<T> Context<T> for std::result::Result<T, Errno> {
    fn context(self, op: &'static str, path: &str) -> Result<T> {
        self.map_err(|errno| Error::os(op, path, errno))
    }
}
