//! The filesystem calls that everything else is written against.
//!
//! All calls are relative to an open directory. A *name* is one component; a *path* is one or more,
//! opened beneath its directory without following any symbolic link. Callers check names that came
//! from data with [`check_path`] first; implementations confine them all the same.

use std::ops::ControlFlow;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;

pub mod direct;
pub mod real;
pub mod sim;
pub mod whole;

/// A bare result; callers add operation and path with [`crate::error::Context`].
pub type Io<T> = Result<T, Errno>;

/// What a directory entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link.
    Link,
    /// Anything else: FIFO, socket, device.
    Other,
    /// The directory listing did not say; ask [`Fs::stat`].
    Unknown,
}

/// What `statx` says, as far as it is used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// Kind of the entry itself; links are not followed.
    pub kind: FileKind,
    /// Size in bytes.
    pub size: u64,
    /// Device number.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// Number of hard links.
    pub nlink: u64,
    /// Modification time in nanoseconds since the epoch.
    pub mtime_ns: i128,
}

/// A filesystem: the real one ([`real::RealFs`]) or a disk in memory that can lose power
/// ([`sim::SimFs`]).
pub trait Fs: Clone + Send + Sync {
    /// An open directory.
    type Dir: Send + Sync;
    /// An open regular file.
    type File: Send + Sync;
    /// A lock held by this process; given up when dropped.
    type Lock: Send + Sync;

    /// Opens a directory beneath `at`. On NFS this also revalidates what the client knows of it.
    fn open_dir(&self, at: &Self::Dir, path: &str) -> Io<Self::Dir>;
    /// Makes a directory; an existing one is `EEXIST`.
    fn make_dir(&self, at: &Self::Dir, name: &str, mode: u32) -> Io<()>;
    /// Removes an empty directory.
    fn remove_dir(&self, at: &Self::Dir, name: &str) -> Io<()>;
    /// Opens a regular file for reading; never blocks on a FIFO. `EISDIR` for a directory, `EINVAL`
    /// for anything else that is not a regular file, `ELOOP` for a symbolic link.
    fn open(&self, at: &Self::Dir, path: &str) -> Io<Self::File>;
    /// Creates a regular file for writing (and reading); an existing name is `EEXIST`.
    fn create(&self, at: &Self::Dir, name: &str, mode: u32) -> Io<Self::File>;
    /// Sets the mode of a file or directory just made, whatever the umask.
    fn set_mode(&self, at: &Self::Dir, name: &str, mode: u32) -> Io<()>;
    /// Reads once; may be short, 0 at the end. Interrupted calls are repeated inside.
    fn read_at(&self, file: &Self::File, buf: &mut [u8], offset: u64) -> Io<usize>;
    /// Writes once; may be short. Interrupted calls are repeated inside.
    fn write_at(&self, file: &Self::File, buf: &[u8], offset: u64) -> Io<usize>;
    /// Makes data (and size) of a file durable. Never call it again after it failed.
    fn sync_file(&self, file: &Self::File) -> Io<()>;
    /// Makes the entries of a directory durable. Never call it again after it failed.
    fn sync_dir(&self, dir: &Self::Dir) -> Io<()>;
    /// Describes an entry without following links.
    fn stat(&self, at: &Self::Dir, path: &str) -> Io<Stat>;
    /// Describes an open file.
    fn stat_file(&self, file: &Self::File) -> Io<Stat>;
    /// Describes an open directory.
    fn stat_dir(&self, dir: &Self::Dir) -> Io<Stat>;
    /// Gives a file a second name; an existing target is `EEXIST`.
    fn link(&self, from: &Self::Dir, name: &str, to: &Self::Dir, new_name: &str) -> Io<()>;
    /// Renames a file or directory, replacing a file or an empty directory.
    fn rename(&self, from: &Self::Dir, name: &str, to: &Self::Dir, new_name: &str) -> Io<()>;
    /// Removes a name of a file.
    fn unlink(&self, at: &Self::Dir, name: &str) -> Io<()>;
    /// Locks a file made for nothing else; `EAGAIN` if another process, or another lock of this
    /// one, holds it. A forked child does not hold it.
    fn lock(&self, at: &Self::Dir, name: &str) -> Io<Self::Lock>;
    /// The kernel's descriptor, for what reads without [`Fs::read_at`]; none where all must go through it.
    fn file_fd<'f>(&self, _file: &'f Self::File) -> Option<BorrowedFd<'f>> {
        None
    }
    /// The kernel's descriptor of a directory, likewise.
    fn dir_fd<'d>(&self, _dir: &'d Self::Dir) -> Option<BorrowedFd<'d>> {
        None
    }
    /// Calls `each` for every entry but `.` and `..` until it breaks; names that are not UTF-8 are
    /// passed over (no name of ours is one).
    fn list(
        &self,
        dir: &Self::Dir,
        each: &mut dyn FnMut(&str, FileKind) -> ControlFlow<()>,
    ) -> Io<()>;
}

/// Checks a relative path that came from data: components of `[A-Za-z0-9._-]`, 1 to 200 bytes each,
/// none starting with a dot. Returns why not.
pub fn check_path(path: &str) -> Result<(), &'static str> {
    if path.is_empty() {
        return Err("the path is empty");
    }
    if path.starts_with('/') {
        return Err("the path is absolute; payload files are named relative to the store");
    }
    for part in path.split('/') {
        if part.is_empty() || part.len() > 200 {
            return Err("a path component must have 1 to 200 bytes");
        }
        if part.starts_with('.') {
            return Err("a path component must not start with a dot");
        }
        // Without an early end, so that the compiler looks at many bytes at once.
        let fine = |b: u8| b.is_ascii_alphanumeric() | matches!(b, b'.' | b'_' | b'-');
        if !part.bytes().fold(true, |all, b| all & fine(b)) {
            return Err("a path component may hold only A-Z a-z 0-9 . _ -");
        }
    }
    Ok(())
}

/// Splits `a/b/c` into (`a/b`, `c`); the parent of a single component is `""`.
pub fn split_path(path: &str) -> (&str, &str) {
    // By bytes, which is several times faster than by characters.
    match path.as_bytes().iter().rposition(|b| *b == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => ("", path),
    }
}
