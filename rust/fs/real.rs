//! The real filesystem: every call relative to a directory fd, confined beneath it.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{
    self, AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, RawDir, ResolveFlags,
};
use rustix::io::{Errno, pread, pwrite, retry_on_intr};

use super::{FileKind, Fs, Io, Stat};

/// How paths are kept beneath their directory and off symbolic links; the answers are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confinement {
    /// By the kernel, in one call.
    Openat2,
    /// Component by component with `O_NOFOLLOW`, where `openat2` is missing or blocked.
    Checked,
}

/// The real filesystem.
#[derive(Debug, Clone, Copy)]
pub struct RealFs {
    confinement: Confinement,
}

const READ: OFlags = OFlags::RDONLY
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
const DIR: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

impl Default for RealFs {
    fn default() -> Self {
        Self::new()
    }
}

impl RealFs {
    /// Asks the kernel once whether `openat2` works here (containers may block it).
    pub fn new() -> Self {
        let asked = retry_on_intr(|| fs::openat2(CWD, ".", DIR, Mode::empty(), beneath()));
        let blocked = matches!(asked, Err(Errno::NOSYS | Errno::PERM | Errno::INVAL));
        Self::with(if blocked {
            Confinement::Checked
        } else {
            Confinement::Openat2
        })
    }

    /// The way paths are confined is given: for tests.
    pub fn with(confinement: Confinement) -> Self {
        Self { confinement }
    }

    /// The way in use.
    pub fn confinement(&self) -> Confinement {
        self.confinement
    }

    /// Opens a directory that the user named; links in its path are the user's. With `create` it is
    /// made, parents too, durably.
    pub fn open_root(&self, path: &str, create: bool) -> Io<OwnedFd> {
        let path = Path::new(if path.is_empty() { "." } else { path });
        let flags = DIR.difference(OFlags::NOFOLLOW);
        let open = |path: &Path| retry_on_intr(|| fs::openat(CWD, path, flags, Mode::empty()));
        if create {
            let mut missing = Vec::new();
            let mut at = path;
            while let Err(Errno::NOENT) = open(at) {
                missing.push(at);
                at = match at.parent() {
                    Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
                    Some(parent) => parent,
                    None => return Err(Errno::NOENT),
                };
            }
            for next in missing.into_iter().rev() {
                match retry_on_intr(|| fs::mkdirat(CWD, next, Mode::from_raw_mode(0o777))) {
                    Ok(()) | Err(Errno::EXIST) => self.sync_dir(&open(at)?)?,
                    Err(errno) => return Err(errno),
                }
                at = next;
            }
        }
        open(path)
    }

    fn beneath(self, at: BorrowedFd<'_>, path: &str, flags: OFlags) -> Io<OwnedFd> {
        for part in path.split('/') {
            component(part)?;
        }
        match self.confinement {
            Confinement::Openat2 => {
                // RESOLVE_NO_SYMLINKS alone gives ELOOP for directories too.
                let flags = flags.difference(OFlags::NOFOLLOW);
                retry_on_intr(|| fs::openat2(at, path, flags, Mode::empty(), beneath()))
            }
            Confinement::Checked => {
                let mut parts = path.split('/').peekable();
                let mut held: Option<OwnedFd> = None;
                while let Some(part) = parts.next() {
                    let here = held.as_ref().map_or(at, AsFd::as_fd);
                    let flags = if parts.peek().is_some() { DIR } else { flags };
                    match retry_on_intr(|| fs::openat(here, part, flags, Mode::empty())) {
                        Ok(fd) => held = Some(fd),
                        // With O_DIRECTORY a link is reported as "not a directory".
                        Err(Errno::NOTDIR) if kind_at(here, part) == Some(FileKind::Link) => {
                            return Err(Errno::LOOP);
                        }
                        Err(errno) => return Err(errno),
                    }
                }
                held.ok_or(Errno::INVAL)
            }
        }
    }
}

fn beneath() -> ResolveFlags {
    ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS
}

/// A name is one component and not a way up.
fn component(name: &str) -> Io<&str> {
    let up = |bad, b| bad | matches!(b, b'/' | 0);
    let bad = matches!(name, "" | "." | "..") || name.bytes().fold(false, up);
    if bad { Err(Errno::INVAL) } else { Ok(name) }
}

pub(crate) fn kind_of(kind: FileType) -> FileKind {
    match kind {
        FileType::RegularFile => FileKind::File,
        FileType::Directory => FileKind::Dir,
        FileType::Symlink => FileKind::Link,
        FileType::Unknown => FileKind::Unknown,
        _ => FileKind::Other,
    }
}

fn kind_at(at: BorrowedFd<'_>, name: &str) -> Option<FileKind> {
    let stat = fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    Some(kind_of(FileType::from_raw_mode(stat.st_mode)))
}

// The widths of the fields differ between architectures.
#[allow(
    clippy::useless_conversion,
    clippy::cast_sign_loss,
    clippy::unnecessary_cast
)]
fn stat_of(stat: &fs::Stat) -> Stat {
    Stat {
        kind: kind_of(FileType::from_raw_mode(stat.st_mode)),
        size: stat.st_size as u64,
        dev: stat.st_dev.into(),
        ino: stat.st_ino.into(),
        nlink: stat.st_nlink.into(),
        mtime_ns: i128::from(stat.st_mtime) * 1_000_000_000 + i128::from(stat.st_mtime_nsec),
    }
}

impl Fs for RealFs {
    type Dir = OwnedFd;
    type File = OwnedFd;
    type Lock = RealLock;

    fn open_dir(&self, at: &OwnedFd, path: &str) -> Io<OwnedFd> {
        if path.is_empty() {
            return retry_on_intr(|| fs::openat(at, ".", DIR, Mode::empty()));
        }
        self.beneath(at.as_fd(), path, DIR)
    }

    fn make_dir(&self, at: &OwnedFd, name: &str, mode: u32) -> Io<()> {
        let name = component(name)?;
        retry_on_intr(|| fs::mkdirat(at, name, Mode::from_raw_mode(mode)))
    }

    fn remove_dir(&self, at: &OwnedFd, name: &str) -> Io<()> {
        let name = component(name)?;
        retry_on_intr(|| fs::unlinkat(at, name, AtFlags::REMOVEDIR))
    }

    fn open(&self, at: &OwnedFd, path: &str) -> Io<OwnedFd> {
        let fd = match self.beneath(at.as_fd(), path, READ) {
            // A socket, or a device without a driver.
            Err(Errno::NXIO) => return Err(Errno::INVAL),
            other => other?,
        };
        match kind_of(FileType::from_raw_mode(fs::fstat(&fd)?.st_mode)) {
            FileKind::File => Ok(fd),
            FileKind::Dir => Err(Errno::ISDIR),
            _ => Err(Errno::INVAL),
        }
    }

    fn create(&self, at: &OwnedFd, name: &str, mode: u32) -> Io<OwnedFd> {
        let name = component(name)?;
        let new = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        let flags = new | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        retry_on_intr(|| fs::openat(at, name, flags, Mode::from_raw_mode(mode)))
    }

    fn set_mode(&self, at: &OwnedFd, name: &str, mode: u32) -> Io<()> {
        let fd = self.beneath(at.as_fd(), component(name)?, READ)?;
        retry_on_intr(|| fs::fchmod(&fd, Mode::from_raw_mode(mode)))
    }

    fn read_at(&self, file: &OwnedFd, buf: &mut [u8], offset: u64) -> Io<usize> {
        retry_on_intr(|| pread(file, &mut *buf, offset))
    }

    fn write_at(&self, file: &OwnedFd, buf: &[u8], offset: u64) -> Io<usize> {
        retry_on_intr(|| pwrite(file, buf, offset))
    }

    fn sync_file(&self, file: &OwnedFd) -> Io<()> {
        retry_on_intr(|| fs::fdatasync(file))
    }

    fn sync_dir(&self, dir: &OwnedFd) -> Io<()> {
        match retry_on_intr(|| fs::fsync(dir)) {
            // Filesystems without a notion of it say so this way; their entries are the server's.
            Err(Errno::INVAL) => Ok(()),
            other => other,
        }
    }

    fn stat(&self, at: &OwnedFd, path: &str) -> Io<Stat> {
        let (parent, name) = super::split_path(path);
        let name = component(name)?;
        let of = |at: BorrowedFd<'_>| {
            retry_on_intr(|| fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW)).map(|s| stat_of(&s))
        };
        if parent.is_empty() {
            return of(at.as_fd());
        }
        of(self.beneath(at.as_fd(), parent, DIR)?.as_fd())
    }

    fn stat_file(&self, file: &OwnedFd) -> Io<Stat> {
        retry_on_intr(|| fs::fstat(file)).map(|stat| stat_of(&stat))
    }

    fn stat_dir(&self, dir: &OwnedFd) -> Io<Stat> {
        self.stat_file(dir)
    }

    fn link(&self, from: &OwnedFd, name: &str, to: &OwnedFd, new_name: &str) -> Io<()> {
        let (name, new_name) = (component(name)?, component(new_name)?);
        retry_on_intr(|| fs::linkat(from, name, to, new_name, AtFlags::empty()))
    }

    fn rename(&self, from: &OwnedFd, name: &str, to: &OwnedFd, new_name: &str) -> Io<()> {
        let (name, new_name) = (component(name)?, component(new_name)?);
        retry_on_intr(|| fs::renameat(from, name, to, new_name))
    }

    fn unlink(&self, at: &OwnedFd, name: &str) -> Io<()> {
        let name = component(name)?;
        retry_on_intr(|| fs::unlinkat(at, name, AtFlags::empty()))
    }

    fn lock(&self, at: &OwnedFd, name: &str) -> Io<RealLock> {
        let name = component(name)?;
        let pid = std::process::id();
        // Held throughout: POSIX gives a lock up when any fd of the file is closed in the process,
        // so a file that is locked here must not even be opened.
        let mut held = held();
        for _ in 0..8 {
            if let Ok(stat) = self.stat(at, name) {
                if held.contains(&(pid, stat.dev, stat.ino)) {
                    return Err(Errno::AGAIN);
                }
                if let Some(errno) = super::whole::wrong_kind(stat.kind) {
                    return Err(errno);
                }
            }
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let fd = retry_on_intr(|| fs::openat(at, name, flags, Mode::from_raw_mode(0o666)))?;
            match retry_on_intr(|| fs::fcntl_lock(&fd, FlockOperation::NonBlockingLockExclusive)) {
                Err(Errno::ACCESS) => return Err(Errno::AGAIN),
                other => other?,
            }
            let own = self.stat_file(&fd)?;
            let key = (pid, own.dev, own.ino);
            // The name may have been given to another file before the lock was there.
            if self
                .stat(at, name)
                .is_ok_and(|now| (pid, now.dev, now.ino) == key)
            {
                held.insert(key);
                return Ok(RealLock { fd: Some(fd), key });
            }
        }
        Err(Errno::AGAIN)
    }

    fn file_fd<'f>(&self, file: &'f OwnedFd) -> Option<BorrowedFd<'f>> {
        Some(file.as_fd())
    }

    fn dir_fd<'d>(&self, dir: &'d OwnedFd) -> Option<BorrowedFd<'d>> {
        Some(dir.as_fd())
    }

    fn list(
        &self,
        dir: &OwnedFd,
        each: &mut dyn FnMut(&str, FileKind) -> ControlFlow<()>,
    ) -> Io<()> {
        // An own open file description: the position is not shared with other threads.
        let fd = self.open_dir(dir, "")?;
        let mut buf = vec![MaybeUninit::uninit(); 128 << 10];
        let mut entries = RawDir::new(&fd, &mut buf);
        while let Some(entry) = entries.next() {
            let entry = match entry {
                Err(Errno::INTR) => continue,
                other => other?,
            };
            let name: &CStr = entry.file_name();
            // A name that is no text is shown as one that is not there: whoever needs it fails over it.
            let name = name.to_string_lossy();
            if !matches!(&*name, "." | "..") && each(&name, kind_of(entry.file_type())).is_break() {
                break;
            }
        }
        Ok(())
    }
}

/// A lock of [`RealFs`].
#[derive(Debug)]
pub struct RealLock {
    fd: Option<OwnedFd>,
    key: (u32, u64, u64),
}

impl Drop for RealLock {
    fn drop(&mut self) {
        // Closed first: closing after another thread took the lock would give up that one.
        let mut held = held();
        drop(self.fd.take());
        held.remove(&self.key);
    }
}

/// The locks of this process as (pid, device, inode); the pid makes a forked child's copy void.
fn held() -> MutexGuard<'static, BTreeSet<(u32, u64, u64)>> {
    static HELD: Mutex<BTreeSet<(u32, u64, u64)>> = Mutex::new(BTreeSet::new());
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
