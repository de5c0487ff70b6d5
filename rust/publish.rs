//! Publish: a temporary beside the target, written, one rename.
//!
//! Killed at any moment, a final name is absent or complete. After a power cut that holds for
//! durable writes only; the others may leave an empty or torn file, which its header betrays.

use std::collections::{BTreeMap, BTreeSet};

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

struct VersionDir<F: Fs> {
    dir: F::Dir,
    stat: Stat,
}

impl<F: Fs> Store<F> {
    /// Writes each file; one result per file. With `durable`, a result also means that the file
    /// survives a power cut.
    pub fn publish(&self, files: &[FileToWrite<'_>], durable: bool) -> Vec<Result<Published>> {
        let versions: BTreeSet<u64> = files.iter().map(|file| file.version).collect();
        let dirs: BTreeMap<u64, Result<VersionDir<F>>> = versions
            .into_iter()
            .map(|version| (version, self.version_dir(version)))
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

    fn version_dir(&self, version: u64) -> Result<VersionDir<F>> {
        let name = format!("v{version}");
        let dir = whole::ensure_dir(&self.fs, &self.dir, &name, self.group);
        let dir = dir.context("publish", &name)?;
        let stat = self.fs.stat_dir(&dir).context("publish", &name)?;
        Ok(VersionDir { dir, stat })
    }

    fn publish_one(
        &self,
        file: &FileToWrite<'_>,
        to: &VersionDir<F>,
        maker: &Maker,
        durable: bool,
    ) -> Result<Published> {
        let layout = plan(file)?;
        let version = format!("v{}", file.version);
        let name = format!("{}.safetensors", unique());
        let path = format!("{version}/{name}");
        let temporary = maker.temporary();
        let written = whole::new_file(&self.fs, &to.dir, &temporary, self.group, |open| {
            let lists = write(&self.fs, open, &layout, file)?;
            if durable {
                self.fs.sync_file(open)?;
            }
            self.fs.rename(&to.dir, &temporary, &to.dir, &name)?;
            Ok(lists)
        });
        let lists = written.map_err(|errno| match (errno, self.is_still(&version, to)) {
            (Errno::NOENT, Ok(false)) => stale(&path),
            _ => Error::os("publish", &path, errno),
        })?;
        let there = match self.is_still(&version, to) {
            Ok(true) => Ok(()),
            Ok(false) => Err(stale(&path)),
            Err(errno) => Err(Error::os("publish", &path, errno)),
        };
        there.inspect_err(|_| self.take_back(to, &name))?;
        let tensors = lists.iter().enumerate();
        let tensors = tensors
            .map(|(i, list)| (layout.offset(i), segment_checksum(list)))
            .collect();
        Ok(Published {
            file: path,
            tensors,
        })
    }

    /// Whether the version directory still is the one of its name: a rename within one that was
    /// retired succeeds silently.
    fn is_still(&self, version: &str, dir: &VersionDir<F>) -> Io<bool> {
        match self.fs.stat(&self.dir, version) {
            Ok(now) => Ok((now.dev, now.ino) == (dir.stat.dev, dir.stat.ino)),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno),
        }
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
                self.take_back(to, name);
            }
            *result = Err(error.clone());
        }
    }

    /// Removes a final name that is reported as an error; what cannot be removed is an orphan.
    fn take_back(&self, dir: &VersionDir<F>, name: &str) {
        let _ = self.fs.unlink(&dir.dir, name);
    }
}

fn stale(path: &str) -> Error {
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
        let (want, have) = (layout.len(index), tensor.bytes.len());
        if want != have as u64 {
            let (dtype, shape) = (tensor.dtype.numpy(), &tensor.shape);
            let why = format!("{dtype} of shape {shape:?} has {want} bytes, not {have}");
            return Err(Error::invalid("publish", tensor.name, why));
        }
    }
    Ok(layout)
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
        let mut hasher = BlockHasher::new();
        let mut at = layout.offset(index);
        for piece in file.tensors[index].bytes.chunks(PIECE) {
            hasher.update(piece);
            if small {
                data.extend_from_slice(piece);
            } else {
                whole::write_all(fs, open, piece, at)?;
            }
            at += piece.len() as u64;
        }
        lists[index] = hasher.finish();
    }
    let mut head = layout.header(&lists);
    head.extend_from_slice(&data);
    whole::write_all(fs, open, &head, 0)?;
    Ok(lists)
}

#[cfg(test)]
pub(crate) mod tests;
