//! A directory of the run: small files written atomically, durable renames, trees removed.

use std::collections::BTreeMap;

use rustix::io::Errno;

use crate::error::Context;
use crate::format::hex16;
use crate::fs::real::RealFs;
use crate::fs::{FileKind, Fs, Io, split_path, whole};
use crate::names::{Maker, TEMPORARY, TRASH};
use crate::sweep::names_in;
use crate::threads::{self, IO_THREADS};
use crate::{Error, Result};

/// An open directory of the run.
pub struct Root<F: Fs> {
    fs: F,
    dir: F::Dir,
    path: String,
}

/// How [`Root::write`] writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteOptions {
    /// Sync the file and the directories above it.
    pub durable: bool,
    /// A name that is taken is `EEXIST` instead of replaced.
    pub exclusive: bool,
}

impl Root<RealFs> {
    /// Opens a directory of the real filesystem.
    pub fn open_path(path: &str, create: bool) -> Result<Self> {
        let fs = RealFs::new();
        let dir = fs.open_root(path, create).context("open", path)?;
        Ok(Self::open(fs, dir, path))
    }
}

impl<F: Fs> Root<F> {
    /// Wraps an open directory; `path` is for messages.
    pub fn open(fs: F, dir: F::Dir, path: &str) -> Self {
        Self {
            fs,
            dir,
            path: path.into(),
        }
    }

    /// The path it was opened with.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Writes a file atomically; missing parents are made.
    pub fn write(&self, path: &str, data: &[u8], options: WriteOptions) -> Result<()> {
        check(path, "write")?;
        let (parent, name) = split_path(path);
        let chain = self.ensure_chain(parent).context("write", path)?;
        let dir = chain.last().unwrap_or(&self.dir);
        let temporary = Maker::current().temporary();
        whole::new_file(&self.fs, dir, &temporary, false, |file| {
            whole::write_all(&self.fs, file, data, 0)?;
            if options.durable {
                self.fs.sync_file(file)?;
            }
            if options.exclusive {
                self.name_once(dir, &temporary, name)
            } else {
                self.fs.rename(dir, &temporary, dir, name)
            }
        })
        .context("write", path)?;
        if options.durable {
            self.sync_chain(&chain).context("fsync", path)?;
        }
        Ok(())
    }

    /// Reads a whole regular file of at most `limit` bytes.
    pub fn read(&self, path: &str, limit: u64) -> Result<Vec<u8>> {
        check(path, "read")?;
        let (parent, name) = split_path(path);
        let dir = self.fresh(parent).context("read", path)?;
        let file = self.fs.open(&dir, name).context("read", path)?;
        let size = self.fs.stat_file(&file).context("read", path)?.size;
        let length = usize::try_from(size).ok().filter(|_| size <= limit);
        let Some(length) = length else {
            let why = format!("it has {size} bytes, more than the {limit} allowed");
            return Err(Error::invalid("read", path, why));
        };
        let mut data = vec![0; length];
        let n = whole::read_full(&self.fs, &file, &mut data, 0).context("read", path)?;
        data.truncate(n);
        Ok(data)
    }

    /// (name, is a directory) of every entry, sorted; none if the directory is missing.
    pub fn list(&self, path: &str) -> Result<Vec<(String, bool)>> {
        if !path.is_empty() {
            check(path, "list")?;
        }
        let dir = match self.fresh(path) {
            Err(Errno::NOENT) => return Ok(Vec::new()),
            other => other.context("list", path)?,
        };
        let mut names = Vec::new();
        for (name, kind) in names_in(&self.fs, &dir).context("list", path)? {
            let kind = match kind {
                FileKind::Unknown => match self.fs.stat(&dir, &name) {
                    Err(Errno::NOENT) => continue,
                    other => other.context("list", path)?.kind,
                },
                known => known,
            };
            names.push((name, kind == FileKind::Dir));
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Renames durably; missing parents of `target` are made. A taken target is `EEXIST`.
    pub fn rename(&self, source: &str, target: &str) -> Result<()> {
        check(source, "rename")?;
        check(target, "rename")?;
        let (from, name) = split_path(source);
        let (to, new_name) = split_path(target);
        let from = self.fresh(from).context("rename", source)?;
        self.fs.stat(&from, name).context("rename", source)?;
        let chain = self.ensure_chain(to).context("rename", target)?;
        let to = chain.last().unwrap_or(&self.dir);
        self.absent(to, new_name).context("rename", target)?;
        self.fs
            .rename(&from, name, to, new_name)
            .map_err(taken)
            .context("rename", target)?;
        // The new name first: losing both is worse than keeping both.
        self.sync_chain(&chain).context("fsync", target)?;
        self.fs.sync_dir(&from).context("fsync", source)
    }

    /// Removes a file or a whole tree; missing is fine.
    pub fn remove(&self, path: &str) -> Result<()> {
        check(path, "remove")?;
        let (parent, name) = split_path(path);
        match self.fresh(parent) {
            Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(Error::os("remove", path, errno)),
            Ok(dir) => remove_tree(&self.fs, &dir, name).map(drop),
        }
    }

    /// (size, XXH3-64 as 16 hex digits) of each file.
    pub fn hash(&self, files: &[String]) -> Vec<Result<(u64, String)>> {
        let mut parents: BTreeMap<&str, Io<F::Dir>> = BTreeMap::new();
        for file in files.iter().filter(|file| check(file, "hash").is_ok()) {
            let parent = split_path(file).0;
            parents.entry(parent).or_insert_with(|| self.fresh(parent));
        }
        threads::map(files, IO_THREADS, |file| {
            check(file, "hash")?;
            let (parent, name) = split_path(file);
            let dir = parents[parent]
                .as_ref()
                .map_err(|errno| Error::os("hash", file, *errno))?;
            let open = self.fs.open(dir, name).context("hash", file)?;
            let (size, hash) = whole::hash_file(&self.fs, &open).context("hash", file)?;
            Ok((size, hex16(hash)))
        })
    }

    /// Opens `path` beneath the freshly opened root.
    fn fresh(&self, path: &str) -> Io<F::Dir> {
        let root = self.fs.open_dir(&self.dir, "")?;
        if path.is_empty() {
            Ok(root)
        } else {
            self.fs.open_dir(&root, path)
        }
    }

    /// Opens every directory on the way to `path`, making what is missing.
    fn ensure_chain(&self, path: &str) -> Io<Vec<F::Dir>> {
        let mut chain: Vec<F::Dir> = Vec::new();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            let at = chain.last().unwrap_or(&self.dir);
            chain.push(whole::ensure_dir(&self.fs, at, part, false)?);
        }
        Ok(chain)
    }

    /// Syncs the directories from the deepest up to the root: nobody knows who made them, and
    /// whether that was durable.
    fn sync_chain(&self, chain: &[F::Dir]) -> Io<()> {
        chain
            .iter()
            .rev()
            .chain([&self.dir])
            .try_for_each(|dir| self.fs.sync_dir(dir))
    }

    fn absent(&self, dir: &F::Dir, name: &str) -> Io<()> {
        match self.fs.stat(dir, name) {
            Err(Errno::NOENT) => Ok(()),
            Ok(_) => Err(Errno::EXIST),
            Err(errno) => Err(errno),
        }
    }

    /// Gives the temporary its name unless that is taken.
    fn name_once(&self, dir: &F::Dir, temporary: &str, name: &str) -> Io<()> {
        match self.fs.link(dir, temporary, dir, name) {
            Err(errno) if whole::cannot_link(errno) => {
                // Without links two writers at once can both succeed; one process writes these.
                self.absent(dir, name)?;
                self.fs.rename(dir, temporary, dir, name)
            }
            other => {
                other?;
                // The file is there under its name; a temporary too many is for a sweep.
                let _ = self.fs.unlink(dir, temporary);
                Ok(())
            }
        }
    }
}

/// A directory in the way of another says so in more than one way.
pub(crate) fn taken(errno: Errno) -> Errno {
    match errno {
        Errno::NOTEMPTY | Errno::NOTDIR | Errno::ISDIR => Errno::EXIST,
        other => other,
    }
}

/// Checks a path beneath a root. The run's own names start without a dot, but for temporaries and
/// trash; below the first component lie other programs' checkpoints, which hold names like
/// `.metadata`.
fn check(path: &str, op: &'static str) -> Result<()> {
    let wrong = |why: &str| Err(Error::invalid(op, path, why));
    for (depth, part) in path.split('/').enumerate() {
        if matches!(part, "" | "." | "..") || part.len() > 255 || part.contains('\0') {
            return wrong("a path is relative, of components of 1 to 255 bytes without . and ..");
        }
        let ours = part.starts_with(TEMPORARY) || part.starts_with(TRASH);
        if depth == 0 && part.starts_with('.') && !ours {
            return wrong("the first component starts with a dot only in .tmp-* and .trash-*");
        }
    }
    Ok(())
}

/// Removes a file or a whole tree without following links; returns how many files there were.
///
/// Missing is fine. What NFS keeps for open files (`.nfs*`) stays, and the directories above it.
pub fn remove_tree<F: Fs>(fs: &F, at: &F::Dir, name: &str) -> Result<u64> {
    let stat = match fs.stat(at, name) {
        Err(Errno::NOENT) => return Ok(0),
        other => other.context("remove", name)?,
    };
    remove_entry(fs, at, name, stat.kind).context("remove", name)
}

fn remove_entry<F: Fs>(fs: &F, at: &F::Dir, name: &str, kind: FileKind) -> Io<u64> {
    let kind = match kind {
        FileKind::Unknown => match fs.stat(at, name) {
            Err(Errno::NOENT) => return Ok(0),
            other => other?.kind,
        },
        known => known,
    };
    if kind != FileKind::Dir {
        return match fs.unlink(at, name) {
            Ok(()) => Ok(1),
            Err(Errno::NOENT) => Ok(0),
            Err(errno) => Err(errno),
        };
    }
    let dir = match fs.open_dir(at, name) {
        Err(Errno::NOENT) => return Ok(0),
        other => other?,
    };
    let mut removed = 0;
    let mut tries = 3;
    loop {
        let names = names_in(fs, &dir)?;
        let kept = |name: &str| name.starts_with(".nfs");
        for (name, kind) in names.iter().filter(|(name, _)| !kept(name)) {
            removed += remove_entry(fs, &dir, name, *kind)?;
        }
        match fs.remove_dir(at, name) {
            Ok(()) | Err(Errno::NOENT) => return Ok(removed),
            Err(Errno::NOTEMPTY | Errno::EXIST) => {
                let left = names_in(fs, &dir)?;
                // Only kept files, or directories kept above such.
                if left
                    .iter()
                    .all(|(name, kind)| kept(name) || *kind == FileKind::Dir)
                {
                    return Ok(removed);
                }
                tries -= 1;
                if tries == 0 {
                    return Err(Errno::NOTEMPTY);
                }
            }
            Err(errno) => return Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::fs::sim::SimFs;
    use crate::publish::tests::models;

    const DURABLE: WriteOptions = WriteOptions {
        durable: true,
        exclusive: false,
    };
    const ONCE: WriteOptions = WriteOptions {
        durable: true,
        exclusive: true,
    };

    fn root(fs: &SimFs) -> Root<SimFs> {
        Root::open(fs.clone(), fs.root(), "sim")
    }

    #[test]
    fn a_durable_write_is_old_or_new_at_every_stop() {
        // Promise: killed or unplugged anywhere, the file is the old or the new one, never torn.
        let start = SimFs::new();
        root(&start).write("a/b/f", b"old", DURABLE).unwrap();
        let whole = start.kill();
        root(&whole).write("a/b/f", b"new", DURABLE).unwrap();
        for n in 0..=whole.operations() {
            let fs = start.kill();
            fs.stop_at(n);
            let done = root(&fs).write("a/b/f", b"new", DURABLE).is_ok();
            for after in models().map(|model| fs.power_cut(model)).chain([fs.kill()]) {
                let now = root(&after).read("a/b/f", 10).unwrap();
                assert!(now == b"new" || now == b"old" && !done, "stopped at {n}");
            }
            let fs = start.kill();
            fs.fail_at(n, Errno::NOSPC);
            if root(&fs).write("a/b/f", b"new", DURABLE).is_err() {
                assert_eq!(fs.files().len(), 1, "operation {n}: a temporary is left");
            }
        }
    }

    #[test]
    fn exclusive_writes_have_one_winner() {
        // Promise: a taken name is EEXIST and keeps its content, with links and without.
        for refuse in [false, true] {
            let fs = SimFs::new();
            fs.refuse_links(refuse);
            root(&fs).write("f", b"1", ONCE).unwrap();
            let error = root(&fs).write("f", b"2", ONCE).unwrap_err();
            assert_eq!(error.errno(), Some(Errno::EXIST));
            assert_eq!(fs.files(), BTreeMap::from([("f".into(), b"1".to_vec())]));
        }
    }

    #[test]
    fn renames_are_durable_and_never_replace() {
        // Promise: after a rename the tree is at its target in every crash image; a taken target,
        // even an empty directory, is EEXIST.
        let fs = SimFs::new();
        let run = root(&fs);
        run.write("src/f", b"1", DURABLE).unwrap();
        fs.make_dir(&fs.root(), "empty", 0o777).unwrap();
        assert_eq!(
            run.rename("src", "empty").unwrap_err().errno(),
            Some(Errno::EXIST)
        );
        assert_eq!(
            run.rename("no", "x/y").unwrap_err().errno(),
            Some(Errno::NOENT)
        );
        run.rename("src", "dst/deep/.metadata").unwrap();
        for model in models() {
            assert_eq!(fs.power_cut(model).files()["dst/deep/.metadata/f"], b"1");
        }
        assert_eq!(
            run.list("").unwrap(),
            [("dst".to_string(), true), ("empty".to_string(), true)]
        );
        assert_eq!(run.list("no/such").unwrap(), []);
        assert!(run.read("dst/deep/.metadata/f", 0).is_err());
        let hashes = run.hash(&["dst/deep/.metadata/f".into(), "no".into(), "../x".into()]);
        assert_eq!(hashes[0].as_ref().unwrap().1, crate::format::xxh3_hex(b"1"));
        assert!(hashes[1].is_err() && hashes[2].is_err());
        run.remove("dst").unwrap();
        run.remove("dst").unwrap();
        run.remove("no/such").unwrap();
        assert!(fs.files().is_empty());
        for bad in ["", "..", "a/../b", "/a", ".hidden", "a//b", "a/."] {
            assert!(run.remove(bad).is_err(), "{bad:?}");
        }
        run.remove(".trash-x").unwrap();
    }

    #[test]
    fn trees_go_but_for_what_nfs_keeps() {
        // Promise: links are removed and not followed; `.nfs*` of open files is left for later.
        let temp = tempfile::tempdir().unwrap();
        let tree = temp.path().join("tree/a");
        std::fs::create_dir_all(&tree).unwrap();
        std::fs::write(temp.path().join("outside"), "1").unwrap();
        std::os::unix::fs::symlink(temp.path(), tree.join("link")).unwrap();
        std::fs::write(tree.join("f"), "1").unwrap();
        std::fs::write(tree.join(".nfs01"), "1").unwrap();
        let run = Root::<RealFs>::open_path(temp.path().to_str().unwrap(), false).unwrap();
        run.remove("tree").unwrap();
        assert!(tree.join(".nfs01").exists() && !tree.join("f").exists());
        std::fs::remove_file(tree.join(".nfs01")).unwrap();
        run.remove("tree").unwrap();
        assert!(!temp.path().join("tree").exists() && temp.path().join("outside").exists());
    }
}
