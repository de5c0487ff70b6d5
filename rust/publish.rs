//! Publish: a temporary beside the target, written, one rename.
//!
//! Killed at any moment, a final name is absent or complete. After a power cut that holds for
//! durable writes only; the others may leave an empty or torn file, which its header betrays.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use rustix::io::Errno;

use crate::error::Context;
use crate::format::{BlockHasher, DType, Layout, PIECE, TensorSpec, segment_checksum};
use crate::fs::{Fs, Io, Stat, whole};
use crate::names::{Maker, unique};
use crate::store::Store;
use crate::threads::{self, IO_THREADS};
use crate::{Error, Result};

/// A tensor to write: its little-endian C-order bytes.
#[derive(Debug, Clone)]
pub struct TensorToWrite<'a> {
    /// The field.
    pub name: &'a str,
    /// The element type.
    pub dtype: DType,
    /// The full shape.
    pub shape: Vec<u64>,
    /// The bytes.
    pub bytes: &'a [u8],
}

/// A payload file to write.
#[derive(Debug, Clone)]
pub struct FileToWrite<'a> {
    /// The policy version whose directory it goes to.
    pub version: u64,
    /// Its tensors.
    pub tensors: Vec<TensorToWrite<'a>>,
}

/// A payload file that readers can open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// Its name relative to the store.
    pub file: String,
    /// (offset from byte 0, segment checksum) of each tensor, in input order.
    pub tensors: Vec<(u64, String)>,
}

/// Files up to this size are put together in memory and written at once.
const SMALL: u64 = 256 << 10;

const RETIRED: &str = "the version directory was retired meanwhile: the payload is too old to keep";

/// An open version directory.
pub(crate) struct VersionDir<F: Fs> {
    name: String,
    pub(crate) dir: F::Dir,
    stat: Stat,
    turn: Mutex<()>,
}

impl<F: Fs> VersionDir<F> {
    /// Opens it beneath the store `root`; makes it if it is missing.
    pub(crate) fn open(fs: &F, root: &F::Dir, version: u64, group: bool) -> Result<Self> {
        let name = format!("v{version}");
        let dir = whole::ensure_dir(fs, root, &name, group).context("publish", &name)?;
        let stat = fs.stat_dir(&dir).context("publish", &name)?;
        let turn = Mutex::default();
        Ok(Self {
            name,
            dir,
            stat,
            turn,
        })
    }

    /// The path of a file in it, relative to the store.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.name)
    }

    /// Whether it still is the one of its name: a rename within one that was retired succeeds
    /// silently.
    fn is_still(&self, fs: &F, root: &F::Dir) -> Io<bool> {
        match fs.stat(root, &self.name) {
            Ok(now) => Ok((now.dev, now.ino) == (self.stat.dev, self.stat.ino)),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    /// The error that `op` met on file `name` in it: what is missing in a retired one is that.
    pub(crate) fn error(
        &self,
        (fs, root): (&F, &F::Dir),
        op: &'static str,
        name: &str,
        errno: Errno,
    ) -> Error {
        match (errno, self.is_still(fs, root)) {
            (Errno::NOENT, Ok(false)) => stale(self.path(name)),
            _ => Error::os(op, self.path(name), errno),
        }
    }

    /// Confirms a rename to `name` that was just made, or takes it back.
    pub(crate) fn confirm(&self, fs: &F, root: &F::Dir, name: &str) -> Result<()> {
        let there = match self.is_still(fs, root) {
            Ok(true) => Ok(()),
            Ok(false) => Err(stale(self.path(name))),
            Err(errno) => Err(Error::os("publish", self.path(name), errno)),
        };
        there.inspect_err(|_| self.take_back(fs, name))
    }

    /// Removes a final name that is reported as an error; what cannot be removed is an orphan.
    fn take_back(&self, fs: &F, name: &str) {
        let _ = fs.unlink(&self.dir, name);
    }
}

impl<F: Fs> Store<F> {
    /// Writes each file; one result per file. With `durable`, a result also means that the file
    /// survives a power cut.
    pub fn publish(&self, files: &[FileToWrite<'_>], durable: bool) -> Vec<Result<Published>> {
        let versions: BTreeSet<u64> = files.iter().map(|file| file.version).collect();
        let dirs: BTreeMap<u64, Result<VersionDir<F>>> = versions
            .into_iter()
            .map(|version| {
                let dir = VersionDir::open(&self.fs, &self.dir, version, self.group);
                (version, dir)
            })
            .collect();
        let maker = Maker::current();
        let mut results = threads::map(files, IO_THREADS, |file| match &dirs[&file.version] {
            Ok(dir) => self.publish_one(file, dir, &maker, durable),
            Err(error) => Err(error.clone()),
        });
        if durable {
            self.seal(&dirs, files, &mut results);
        }
        results
    }

    fn publish_one(
        &self,
        file: &FileToWrite<'_>,
        to: &VersionDir<F>,
        maker: &Maker,
        durable: bool,
    ) -> Result<Published> {
        let layout = plan(file)?;
        let name = format!("{}.safetensors", unique());
        let temporary = maker.temporary();
        // What makes, writes and renames while others' commits are under way waits for them inside the
        // kernel's lock of the directory, and all others behind it; outside of it they only sync.
        let small = layout.size() - layout.data_start() <= SMALL;
        let turn = || (durable && small).then(|| to.turn.lock());
        let first = turn();
        let written = whole::new_file(&self.fs, &to.dir, &temporary, self.group, |open| {
            let lists = write(&self.fs, open, &layout, file)?;
            drop(first);
            if durable {
                self.fs.sync_file(open)?;
            }
            let _turn = turn();
            self.fs.rename(&to.dir, &temporary, &to.dir, &name)?;
            Ok(lists)
        });
        let place = (&self.fs, &self.dir);
        let lists = written.map_err(|errno| to.error(place, "publish", &name, errno))?;
        to.confirm(&self.fs, &self.dir, &name)?;
        let tensors = lists.iter().enumerate();
        let tensors = tensors
            .map(|(i, list)| (layout.offset(i), segment_checksum(list)))
            .collect();
        Ok(Published {
            file: to.path(&name),
            tensors,
        })
    }

    /// Makes the names durable, one sync per directory; takes back what could not be made so.
    fn seal(
        &self,
        dirs: &BTreeMap<u64, Result<VersionDir<F>>>,
        files: &[FileToWrite<'_>],
        results: &mut [Result<Published>],
    ) {
        let pairs = || files.iter().map(|file| file.version);
        let written: BTreeSet<u64> = pairs()
            .zip(results.iter())
            .filter(|(_, r)| r.is_ok())
            .map(|(v, _)| v)
            .collect();
        if written.is_empty() {
            return;
        }
        let written: Vec<_> = written.into_iter().collect();
        let synced = threads::map(&written, IO_THREADS, |version| match &dirs[version] {
            Ok(to) => self
                .fs
                .sync_dir(&to.dir)
                .context("fsync", &format!("v{version}")),
            Err(error) => Err(error.clone()),
        });
        // Always: another writer may have made v<k> without a sync.
        let root = self.fs.sync_dir(&self.dir).context("fsync", self.root());
        let sealed: BTreeMap<u64, Result<()>> = written
            .into_iter()
            .zip(synced)
            .map(|(version, result)| (version, result.and(root.clone())))
            .collect();
        for (version, result) in pairs().zip(results) {
            let (Some(Err(error)), Ok(published)) = (sealed.get(&version), &result) else {
                continue;
            };
            if let (Ok(to), (_, name)) = (&dirs[&version], crate::fs::split_path(&published.file)) {
                to.take_back(&self.fs, name);
            }
            *result = Err(error.clone());
        }
    }
}

fn stale(path: String) -> Error {
    Error::os("publish", path, Errno::STALE).with_hint(RETIRED)
}

fn plan(file: &FileToWrite<'_>) -> Result<Layout> {
    let spec = |tensor: &TensorToWrite<'_>| TensorSpec {
        name: tensor.name.into(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
    };
    let layout = Layout::plan(file.version, file.tensors.iter().map(spec).collect())?;
    for (index, tensor) in file.tensors.iter().enumerate() {
        tensor.check("publish", layout.len(index))?;
    }
    Ok(layout)
}

impl TensorToWrite<'_> {
    /// Whether there are as many bytes as dtype and shape take.
    pub(crate) fn check(&self, op: &'static str, want: u64) -> Result<()> {
        let have = self.bytes.len();
        if want == have as u64 {
            return Ok(());
        }
        let (dtype, shape) = (self.dtype.numpy(), &self.shape);
        let why = format!("{dtype} of shape {shape:?} has {want} bytes, not {have}");
        Err(Error::invalid(op, self.name, why))
    }

    /// Hands the bytes to `each` in pieces (from, bytes), each while it is hot from being hashed;
    /// returns the block list.
    pub(crate) fn hashed(&self, mut each: impl FnMut(u64, &[u8]) -> Io<()>) -> Io<String> {
        let mut hasher = BlockHasher::new();
        let mut at = 0;
        for piece in self.bytes.chunks(PIECE) {
            hasher.update(piece);
            each(at, piece)?;
            at += piece.len() as u64;
        }
        Ok(hasher.finish())
    }
}

/// Writes the file and returns the block lists. Bytes are hashed just before they are written; the
/// header comes last because it holds the checksums.
fn write<F: Fs>(
    fs: &F,
    open: &F::File,
    layout: &Layout,
    file: &FileToWrite<'_>,
) -> Io<Vec<String>> {
    let mut lists = vec![String::new(); file.tensors.len()];
    let small = layout.size() - layout.data_start() <= SMALL;
    let mut data = Vec::new();
    for &index in layout.order() {
        let start = layout.offset(index);
        lists[index] = file.tensors[index].hashed(|from, piece| {
            if small {
                data.extend_from_slice(piece);
                return Ok(());
            }
            whole::write_all(fs, open, piece, start + from)
        })?;
    }
    let mut head = layout.header(&lists);
    head.extend_from_slice(&data);
    whole::write_all(fs, open, &head, 0)?;
    Ok(lists)
}

#[cfg(test)]
pub(crate) mod tests;
