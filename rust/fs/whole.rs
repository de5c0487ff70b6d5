//! Whole files by the single reads and writes of [`Fs`].

use std::hash::Hasher;

use rustix::io::Errno;
use twox_hash::XxHash3_64;

use super::{FileKind, Fs, Io};
use crate::format::PIECE;

/// The modes of what is made: what the umask leaves, or the same for every user of a group.
pub(crate) const GROUP_FILE: u32 = 0o664;
pub(crate) const GROUP_DIR: u32 = 0o2775;

/// Writes all of `bytes` at `offset`.
pub fn write_all<F: Fs>(fs: &F, file: &F::File, mut bytes: &[u8], mut offset: u64) -> Io<()> {
    while !bytes.is_empty() {
        let n = fs.write_at(file, bytes, offset)?;
        if n == 0 {
            return Err(Errno::IO);
        }
        bytes = &bytes[n..];
        offset += n as u64;
    }
    Ok(())
}

/// Fills `buf` from `offset` as far as the file goes; returns how far.
pub fn read_full<F: Fs>(fs: &F, file: &F::File, buf: &mut [u8], offset: u64) -> Io<usize> {
    let mut done = 0;
    while done < buf.len() {
        match fs.read_at(file, &mut buf[done..], offset + done as u64)? {
            0 => break,
            n => done += n,
        }
    }
    Ok(done)
}

/// Calls `each` for the file's bytes in pieces; returns how many there were.
pub fn for_each_piece<F: Fs>(
    fs: &F,
    file: &F::File,
    mut each: impl FnMut(&[u8], u64) -> Io<()>,
) -> Io<u64> {
    let size = fs.stat_file(file)?.size;
    let piece = usize::try_from(size).map_or(PIECE, |size| size.clamp(1, PIECE));
    let mut buf = vec![0; piece];
    let mut at = 0;
    loop {
        let n = read_full(fs, file, &mut buf, at)?;
        if n == 0 {
            return Ok(at);
        }
        each(&buf[..n], at)?;
        at += n as u64;
    }
}

/// Size and XXH3-64 of a file.
pub fn hash_file<F: Fs>(fs: &F, file: &F::File) -> Io<(u64, u64)> {
    let mut hasher = XxHash3_64::new();
    let size = for_each_piece(fs, file, |bytes, _| {
        hasher.write(bytes);
        Ok(())
    })?;
    Ok((size, hasher.finish()))
}

/// Copies `source` to the new name `name` and makes its bytes durable; removes it on errors.
pub fn copy_file<F: Fs>(fs: &F, source: &F::File, to: &F::Dir, name: &str, group: bool) -> Io<u64> {
    new_file(fs, to, name, group, |file| {
        let size = for_each_piece(fs, source, |bytes, at| write_all(fs, file, bytes, at))?;
        fs.sync_file(file)?;
        Ok(size)
    })
}

/// Creates `name` with its mode; nothing is left if that fails.
pub fn create<F: Fs>(fs: &F, dir: &F::Dir, name: &str, group: bool) -> Io<F::File> {
    let made = fs.create(dir, name, 0o666)?;
    if group {
        fs.set_mode(dir, name, GROUP_FILE).inspect_err(|_| {
            let _ = fs.unlink(dir, name);
        })?;
    }
    Ok(made)
}

/// Creates `name`, lets `fill` write it, and removes it again if that fails.
pub fn new_file<F: Fs, T>(
    fs: &F,
    dir: &F::Dir,
    name: &str,
    group: bool,
    fill: impl FnOnce(&F::File) -> Io<T>,
) -> Io<T> {
    let made = create(fs, dir, name, group)?;
    fill(&made).inspect_err(|_| {
        // Nothing more can be done about a temporary that cannot be removed: a sweep will.
        let _ = fs.unlink(dir, name);
    })
}

/// Opens `name` beneath `at`, making it if it is missing; a racing removal is tried against again.
pub fn ensure_dir<F: Fs>(fs: &F, at: &F::Dir, name: &str, group: bool) -> Io<F::Dir> {
    let mut tries = 3;
    loop {
        match fs.open_dir(at, name) {
            Err(Errno::NOENT) if tries > 0 => {}
            other => return other,
        }
        tries -= 1;
        match fs.make_dir(at, name, 0o777) {
            Ok(()) if group => fs.set_mode(at, name, GROUP_DIR)?,
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Whether linking is impossible here, so that a copy has to do.
pub fn cannot_link(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::XDEV | Errno::PERM | Errno::MLINK | Errno::NOSYS | Errno::OPNOTSUPP
    )
}

/// The error that opening an entry of this kind as a payload gives; none for a regular file.
pub fn wrong_kind(kind: FileKind) -> Option<Errno> {
    match kind {
        FileKind::File => None,
        FileKind::Link => Some(Errno::LOOP),
        FileKind::Dir | FileKind::Other | FileKind::Unknown => Some(Errno::INVAL),
    }
}
