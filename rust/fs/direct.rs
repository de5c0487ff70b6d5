//! Whether the page cache has a file, and reads around it.

use std::os::fd::BorrowedFd;

use rustix::fs::{AtFlags, OFlags, StatxFlags, fcntl_setfl, statx};
use rustix::io::{Errno, IoSliceMut, ReadWriteFlags, preadv2, retry_on_intr};

use super::Io;

/// Whether the page cache has the byte at `offset`; none where the filesystem cannot tell without
/// reading it.
///
/// One `preadv2` with `RWF_NOWAIT`, which never waits for a disk.
pub fn is_cached(file: BorrowedFd<'_>, offset: u64) -> Option<bool> {
    let mut byte = [0];
    let read = || {
        let mut into = [IoSliceMut::new(&mut byte)];
        preadv2(file, &mut into, offset, ReadWriteFlags::NOWAIT)
    };
    match retry_on_intr(read) {
        Ok(bytes) => Some(bytes > 0),
        Err(Errno::AGAIN) => Some(false),
        Err(_) => None,
    }
}

/// Makes reads of an open file bypass the page cache, or use it again. `EINVAL` where the filesystem
/// has no such reads, or none whose offsets may be multiples of `align`.
///
/// The open file description changes, so nobody else may have it.
pub fn set_direct(file: BorrowedFd<'_>, on: bool, align: usize) -> Io<()> {
    if on && !aligns(file, align) {
        return Err(Errno::INVAL);
    }
    fcntl_setfl(file, if on { OFlags::DIRECT } else { OFlags::empty() })
}

/// Whether `align` is enough; before Linux 6.1 nobody says, and the first read will.
fn aligns(file: BorrowedFd<'_>, align: usize) -> bool {
    match statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Ok(found) if found.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => {
            let least = [found.stx_dio_mem_align, found.stx_dio_offset_align];
            least
                .iter()
                .all(|&least| least > 0 && align.is_multiple_of(least as usize))
        }
        _ => true,
    }
}
