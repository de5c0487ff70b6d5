//! Pooled destination memory: regions that keep their pages, because faulting fresh pages in costs more
//! than the read that fills them.
//!
//! Regions of [`MAPPED`] bytes or more are anonymous mappings, page-rounded, with huge pages where the
//! system allows them; smaller slabs come from the allocator and are not pooled, so that a batch of many
//! small results does not run into the limit on mappings of a process.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, TryLockError};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::error::{Error, Result};

/// The least size that is mapped and pooled.
pub const MAPPED: usize = 128 << 10;
/// The least size for which huge pages are asked.
const HUGE: usize = 4 << 20;

/// A bounded pool of memory regions. Clones share it.
#[derive(Debug, Clone)]
pub struct Pool {
    free: Arc<Mutex<Free>>,
}

#[derive(Debug)]
struct Free {
    /// Idle regions by size; in each list the most recently used one comes last.
    regions: BTreeMap<usize, Vec<Region>>,
    bytes: usize,
    limit: usize,
}

impl Pool {
    /// A pool that keeps at most `limit` idle bytes; memory in use is not counted.
    pub fn new(limit: usize) -> Self {
        Self {
            free: Arc::new(Mutex::new(Free {
                regions: BTreeMap::new(),
                bytes: 0,
                limit,
            })),
        }
    }

    /// Memory of exactly `len` bytes. It may hold the bytes of an earlier use: write all of it.
    pub fn take(&self, len: usize) -> Result<Slab> {
        if len < MAPPED {
            let mut bytes = Vec::new();
            bytes.try_reserve_exact(len).map_err(|_| no_memory())?;
            bytes.resize(len, 0);
            return Ok(Slab {
                memory: Memory::Small(bytes),
                pool: self.clone(),
            });
        }
        let size = len
            .checked_next_multiple_of(rustix::param::page_size())
            .ok_or_else(no_memory)?;
        let idle = self.with(|free| free.take(size)).flatten();
        let region = match idle {
            Some(region) => region,
            None => Region::map(size)?,
        };
        Ok(Slab {
            memory: Memory::Mapped {
                region: Some(region),
                len,
            },
            pool: self.clone(),
        })
    }

    /// Bytes that are idle now.
    pub fn idle(&self) -> usize {
        self.with(|free| free.bytes).unwrap_or(0)
    }

    /// Runs `act` on the idle list, or passes when somebody else has it. Never waits: a lock that a
    /// `fork` froze in the child would be waited for forever, and a miss only costs a fresh mapping.
    fn with<R>(&self, act: impl FnOnce(&mut Free) -> R) -> Option<R> {
        match self.free.try_lock() {
            Ok(mut free) => Some(act(&mut free)),
            Err(TryLockError::Poisoned(free)) => Some(act(&mut free.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl Free {
    /// The smallest idle region that holds `size` and wastes at most a quarter of it.
    fn take(&mut self, size: usize) -> Option<Region> {
        let (&found, list) = self
            .regions
            .range_mut(size..=size.saturating_add(size / 4))
            .next()?;
        let region = list.pop();
        if list.is_empty() {
            self.regions.remove(&found);
        }
        self.bytes -= found;
        region
    }

    /// Keeps a region; what no longer fits, largest first, is returned to be unmapped by the caller.
    fn put(&mut self, region: Region) -> Vec<Region> {
        if region.size > self.limit {
            return vec![region];
        }
        self.bytes += region.size;
        let mut surplus = Vec::new();
        while self.bytes > self.limit {
            let Some(mut entry) = self.regions.last_entry() else {
                break;
            };
            let list = entry.get_mut();
            if !list.is_empty() {
                let oldest = list.remove(0);
                self.bytes -= oldest.size;
                surplus.push(oldest);
            }
            if list.is_empty() {
                entry.remove();
            }
        }
        self.regions.entry(region.size).or_default().push(region);
        surplus
    }
}

fn no_memory() -> Error {
    Error::os("allocate", "", Errno::NOMEM).with_hint("the result does not fit into memory")
}

/// Memory from a [`Pool`], and back to it on drop.
#[derive(Debug)]
pub struct Slab {
    memory: Memory,
    pool: Pool,
}

#[derive(Debug)]
enum Memory {
    Small(Vec<u8>),
    /// `region` is `Some` until drop; `len <= region.size`.
    Mapped {
        region: Option<Region>,
        len: usize,
    },
}

impl Deref for Slab {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.memory {
            Memory::Small(bytes) => bytes,
            Memory::Mapped { region, len } => region.as_ref().map_or(&[], |r| r.bytes(*len)),
        }
    }
}

impl DerefMut for Slab {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Memory::Small(bytes) => bytes,
            Memory::Mapped { region, len } => {
                region.as_mut().map_or(&mut [], |r| r.bytes_mut(*len))
            }
        }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if let Memory::Mapped { region, .. } = &mut self.memory
            && let Some(region) = region.take()
        {
            // Surplus regions are unmapped here, outside the pool's lock.
            drop(self.pool.with(|free| free.put(region)));
        }
    }
}

/// An anonymous private mapping.
#[derive(Debug)]
struct Region {
    start: NonNull<u8>,
    size: usize,
}

// SAFETY: a `Region` owns its mapping alone; the pointer is reached only through `&self` and `&mut self`.
#[allow(unsafe_code)]
unsafe impl Send for Region {}
// SAFETY: through `&self` the mapping is only read.
#[allow(unsafe_code)]
unsafe impl Sync for Region {}

#[allow(unsafe_code)]
impl Region {
    fn map(size: usize) -> Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), size, prot, flags) }
            .map_err(|_| no_memory())?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(no_memory)?;
        if size >= HUGE {
            // SAFETY: the range is the mapping just made; this advice does not change its contents.
            // A kernel without huge pages refuses, and ordinary pages do.
            let _ = unsafe { madvise(start.as_ptr().cast(), size, Advice::LinuxHugepage) };
        }
        Ok(Self { start, size })
    }

    fn bytes(&self, len: usize) -> &[u8] {
        assert!(len <= self.size);
        // SAFETY: `start` points to `size >= len` mapped bytes (zeroed by the kernel, so initialised),
        // unmapped only in drop; `&self` keeps writers of this module away.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), len) }
    }

    fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= self.size);
        // SAFETY: as in `bytes`, and `&mut self` makes the access unique.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), len) }
    }
}

#[allow(unsafe_code)]
impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, of this size, and no slice of it outlives the region.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.size) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_exact() -> Result<()> {
        // A result is exactly as long as it was asked for, also at zero and around the rounding.
        let pool = Pool::new(1 << 30);
        for len in [
            0,
            1,
            4095,
            MAPPED - 1,
            MAPPED,
            MAPPED + 1,
            HUGE,
            HUGE + 4097,
        ] {
            let mut slab = pool.take(len)?;
            assert_eq!(slab.len(), len);
            slab.fill(7);
            assert!(slab.iter().all(|&b| b == 7));
        }
        Ok(())
    }

    #[test]
    fn memory_returns_and_is_reused() -> Result<()> {
        // The pages of a dead result serve the next one of about that size.
        let pool = Pool::new(1 << 30);
        let mut first = pool.take(MAPPED * 8)?;
        first.fill(9);
        let address = first.as_ptr();
        drop(first);
        assert_eq!(pool.idle(), MAPPED * 8);
        let again = pool.take(MAPPED * 8 - 5000)?;
        assert_eq!(again.as_ptr(), address);
        assert_eq!((again[0], pool.idle()), (9, 0));
        assert_ne!(pool.take(MAPPED * 8)?.as_ptr(), address);
        Ok(())
    }

    #[test]
    fn idle_memory_is_bounded() -> Result<()> {
        // A pool never keeps more than its limit, whatever comes back.
        let pool = Pool::new(MAPPED * 10);
        let slabs: Result<Vec<_>> = (1..8).map(|n| pool.take(MAPPED * n)).collect();
        drop(slabs?);
        assert!(pool.idle() > 0 && pool.idle() <= MAPPED * 10);
        drop(pool.take(MAPPED * 11)?);
        assert!(pool.idle() <= MAPPED * 10);
        Ok(())
    }

    #[test]
    fn too_much_is_an_error() {
        // A claim larger than memory fails; it does not abort the process.
        let pool = Pool::new(0);
        for len in [usize::MAX, usize::MAX / 2, 1 << 50] {
            assert_eq!(
                pool.take(len).map(|s| s.len()).map_err(|e| e.errno()),
                Err(Some(Errno::NOMEM))
            );
        }
    }

    #[test]
    fn a_slab_outlives_its_pool() -> Result<()> {
        // Results stay valid after the store that made them is gone, on any thread.
        let pool = Pool::new(1 << 20);
        let mut slab = pool.take(MAPPED)?;
        drop(pool);
        slab.fill(3);
        std::thread::scope(|s| {
            s.spawn(|| assert!(slab.iter().all(|&b| b == 3)))
                .join()
                .is_ok()
        });
        Ok(())
    }
}
