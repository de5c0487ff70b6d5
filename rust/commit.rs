//! Commit: one checkpoint component, built in a temporary sibling and renamed into place.
//!
//! ```text
//! <checkpoints>/.tmp-...            state files, each synced when written
//!               .../payloads/v<k>/  pins: hard links (or copies) of payloads, their bytes synced
//!               .../manifest.json   last, after every directory was synced from the bottom up
//! rename -> <checkpoints>/step_<N>/<component>; step_<N> and <checkpoints> synced
//! ```
//!
//! Killed or unplugged anywhere, the component is absent or complete; once `finish` has returned it
//! is there. Pins are durable before any payload that they name may be released.

use std::collections::BTreeMap;

use rustix::io::Errno;

use crate::error::Context;
use crate::format::{hex16, xxh3};
use crate::fs::real::RealFs;
use crate::fs::{FileKind, Fs, Io, check_path, split_path, whole};
use crate::names::Maker;
use crate::root::{remove_tree, taken};
use crate::store::{Store, open_parents};
use crate::sweep::names_in;
use crate::threads::{self, IO_THREADS};
use crate::{Error, Result};

const MANIFEST: &str = "manifest.json";
const PAYLOADS: &str = "payloads";

/// How a pin was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pinned {
    /// A second name of the same bytes.
    Link,
    /// A copy, where links are impossible.
    Copy,
}

impl Pinned {
    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Link => "link",
            Self::Copy => "copy",
        }
    }
}

/// Where the component is before it has its name.
struct Draft<F: Fs> {
    parent: F::Dir,
    name: String,
    dir: F::Dir,
    adopted: bool,
}

/// A checkpoint component on its way.
pub struct Commit<F: Fs> {
    fs: F,
    checkpoints: F::Dir,
    path: String,
    step: u64,
    component: String,
    draft: Option<Draft<F>>,
    /// What is pinned already, by file: asking twice gives the first answer.
    pinned: BTreeMap<String, (u64, Pinned)>,
    /// A step that failed leaves a component nobody can vouch for.
    broken: bool,
}

impl Commit<RealFs> {
    /// Begins a component below a path of the real filesystem, in a temporary directory or, with
    /// `adopt`, in an existing directory of the same filesystem.
    pub fn begin_path(
        checkpoints: &str,
        step: u64,
        component: &str,
        adopt: Option<&str>,
    ) -> Result<Self> {
        let fs = RealFs::new();
        let dir = fs
            .open_root(checkpoints, true)
            .context("commit", checkpoints)?;
        let Some(adopt) = adopt else {
            return Self::begin(fs, dir, checkpoints, step, component);
        };
        let path = std::path::Path::new(adopt);
        let name = path.file_name().and_then(|name| name.to_str());
        let (Some(name), Some(parent)) = (name, path.parent().and_then(|parent| parent.to_str()))
        else {
            return Err(Error::invalid(
                "commit",
                adopt,
                "adopt needs the path of a directory",
            ));
        };
        let parent = fs.open_root(parent, false).context("commit", adopt)?;
        Self::adopt(fs, dir, checkpoints, step, component, parent, name)
    }
}

impl<F: Fs> Commit<F> {
    /// Begins a component in a new temporary directory below `checkpoints`; `path` is for messages.
    pub fn begin(
        fs: F,
        checkpoints: F::Dir,
        path: &str,
        step: u64,
        component: &str,
    ) -> Result<Self> {
        check_component(component)?;
        let parent = fs.open_dir(&checkpoints, "").context("commit", path)?;
        let name = Maker::current().temporary();
        fs.make_dir(&parent, &name, 0o777).context("commit", path)?;
        let dir = fs.open_dir(&parent, &name).context("commit", path)?;
        let draft = Draft {
            parent,
            name,
            dir,
            adopted: false,
        };
        Ok(Self::of(fs, checkpoints, path, step, component, draft))
    }

    /// Begins a component that is the directory `name` of `parent`, on the same filesystem.
    pub fn adopt(
        fs: F,
        checkpoints: F::Dir,
        path: &str,
        step: u64,
        component: &str,
        parent: F::Dir,
        name: &str,
    ) -> Result<Self> {
        check_component(component)?;
        let dir = fs.open_dir(&parent, name).context("commit", name)?;
        let draft = Draft {
            parent,
            name: name.into(),
            dir,
            adopted: true,
        };
        Ok(Self::of(fs, checkpoints, path, step, component, draft))
    }

    fn of(
        fs: F,
        checkpoints: F::Dir,
        path: &str,
        step: u64,
        component: &str,
        draft: Draft<F>,
    ) -> Self {
        let (path, component) = (path.to_string(), component.to_string());
        let (draft, pinned) = (Some(draft), BTreeMap::new());
        Self {
            fs,
            checkpoints,
            path,
            step,
            component,
            draft,
            pinned,
            broken: false,
        }
    }

    fn draft(&self, op: &'static str) -> Result<&Draft<F>> {
        let name = || format!("step_{}/{}", self.step, self.component);
        let over = "the component is finished or given up";
        let draft = self
            .draft
            .as_ref()
            .ok_or_else(|| Error::invalid(op, name(), over))?;
        if self.broken {
            let why = "an earlier sync of this component failed, begin a new one";
            return Err(Error::invalid(op, name(), why));
        }
        Ok(draft)
    }

    /// Pins each (file of the store, already durable): (size, how). The bytes are durable then; the
    /// names are with [`Commit::finish`].
    pub fn pin(
        &mut self,
        store: &Store<F>,
        files: &[(String, bool)],
        copy: bool,
    ) -> Vec<Result<(u64, Pinned)>> {
        let mut ask: BTreeMap<&str, bool> = BTreeMap::new();
        for (file, durable) in files
            .iter()
            .filter(|(file, _)| !self.pinned.contains_key(file))
        {
            *ask.entry(file).or_insert(*durable) &= durable;
        }
        let ask: Vec<(&str, bool)> = ask.into_iter().collect();
        let from = open_parents(
            &store.fs,
            &store.dir,
            ask.iter().map(|(file, _)| *file),
            check_path,
        );
        let to: BTreeMap<&str, Result<F::Dir>> = from
            .keys()
            .map(|parent| (*parent, self.pin_dir(parent)))
            .collect();
        let made = threads::map(&ask, IO_THREADS, |(file, durable)| {
            check_path(file).map_err(|why| Error::invalid("pin", *file, why))?;
            let parent = split_path(file).0;
            let from = from[parent]
                .as_ref()
                .map_err(|errno| Error::os("pin", *file, *errno))?;
            let to = to[parent].as_ref().map_err(Clone::clone)?;
            pin_one(store, from, to, file, *durable, copy)
        });
        let mut failed = BTreeMap::new();
        for ((file, _), result) in ask.into_iter().zip(made) {
            match result {
                Ok(pin) => drop(self.pinned.insert(file.to_string(), pin)),
                Err(error) => drop(failed.insert(file.to_string(), error)),
            }
        }
        let result = |(file, _): &(String, bool)| match self.pinned.get(file) {
            Some(pin) => Ok(*pin),
            None => Err(failed[file].clone()),
        };
        files.iter().map(result).collect()
    }

    fn pin_dir(&self, parent: &str) -> Result<F::Dir> {
        let draft = self.draft("pin")?;
        let make = || {
            let mut dir = whole::ensure_dir(&self.fs, &draft.dir, PAYLOADS, false)?;
            for part in parent.split('/').filter(|part| !part.is_empty()) {
                dir = whole::ensure_dir(&self.fs, &dir, part, false)?;
            }
            Ok(dir)
        };
        make().context("pin", parent)
    }

    /// Writes and syncs a state file: (size, XXH3-64 as 16 hex digits).
    pub fn write(&mut self, name: &str, data: &[u8]) -> Result<(u64, String)> {
        check_path(name).map_err(|why| Error::invalid("write", name, why))?;
        if name.contains('/') || matches!(name, MANIFEST | PAYLOADS) {
            return Err(Error::invalid(
                "write",
                name,
                "a state file has a plain name of its own",
            ));
        }
        let draft = self.draft("write")?;
        write_synced(&self.fs, &draft.dir, name, data).context("write", name)?;
        Ok((data.len() as u64, hex16(xxh3(data))))
    }

    /// Syncs and hashes every file that is there: (relative path, size, XXH3-64), sorted.
    pub fn files(&mut self) -> Result<Vec<(String, u64, String)>> {
        let draft = self.draft("files")?;
        let mut found = Vec::new();
        let mut dirs = Vec::new();
        walk(&self.fs, &draft.dir, "", &mut |path, kind| {
            match kind {
                FileKind::File => found.push(path.to_string()),
                FileKind::Dir => dirs.push(path.to_string()),
                _ => {
                    let why = "a component holds files and directories only";
                    return Err(Error::invalid("files", path, why));
                }
            }
            Ok(())
        })?;
        found.sort_unstable();
        let results = threads::map(&found, IO_THREADS, |path| {
            let file = self.fs.open(&draft.dir, path).context("open", path)?;
            self.fs.sync_file(&file).context("fsync", path)?;
            let (size, hash) = whole::hash_file(&self.fs, &file).context("hash", path)?;
            Ok((path.clone(), size, hex16(hash)))
        });
        let results: Result<Vec<_>> = results.into_iter().collect();
        self.broken = results.is_err();
        results
    }

    /// Makes the component visible and durable; `EEXIST` if it is there already. After an error it
    /// is not there, and what was made for it is gone.
    pub fn finish(&mut self, manifest: &[u8]) -> Result<()> {
        let result = self.finish_draft(manifest);
        if result.is_err() {
            self.abort();
        }
        self.draft = None;
        result
    }

    fn finish_draft(&self, manifest: &[u8]) -> Result<()> {
        let draft = self.draft("commit")?;
        let step = format!("step_{}", self.step);
        let target = format!("{step}/{}", self.component);
        self.absent(&target)?;
        let mut dirs = Vec::new();
        walk(&self.fs, &draft.dir, "", &mut |path, kind| {
            if kind == FileKind::Dir {
                dirs.push(path.to_string());
            }
            Ok(())
        })?;
        // A parent comes before its children in the walk.
        for path in dirs.iter().rev() {
            let dir = self.fs.open_dir(&draft.dir, path).context("commit", path)?;
            self.fs.sync_dir(&dir).context("fsync", path)?;
        }
        write_synced(&self.fs, &draft.dir, MANIFEST, manifest).context("commit", MANIFEST)?;
        self.fs.sync_dir(&draft.dir).context("fsync", &draft.name)?;
        let dir = whole::ensure_dir(&self.fs, &self.checkpoints, &step, false);
        let dir = dir.context("commit", &step)?;
        // Again, as late as can be: an empty directory would be replaced silently.
        self.absent(&target)?;
        self.fs
            .rename(&draft.parent, &draft.name, &dir, &self.component)
            .map_err(taken)
            .context("commit", &target)?;
        let synced = self
            .fs
            .sync_dir(&dir)
            .context("fsync", &step)
            .and_then(|()| {
                self.fs
                    .sync_dir(&self.checkpoints)
                    .context("fsync", &self.path)
            });
        synced.inspect_err(|_| self.take_back(draft, &dir))
    }

    fn absent(&self, target: &str) -> Result<()> {
        // Opened anew, so that an NFS client asks its server.
        let fresh = self
            .fs
            .open_dir(&self.checkpoints, "")
            .context("commit", &self.path)?;
        match self.fs.stat(&fresh, target) {
            Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(Error::os("commit", target, errno)),
            Ok(_) => {
                let error = Error::os("commit", target, Errno::EXIST);
                Err(error.with_hint("move the old component aside first"))
            }
        }
    }

    /// Undoes the rename of a component whose name could not be made durable: it must not count.
    fn take_back(&self, draft: &Draft<F>, step: &F::Dir) {
        if self
            .fs
            .rename(step, &self.component, &draft.parent, &draft.name)
            .is_err()
        {
            let trash = Maker::current().trash(&format!("step_{}", self.step));
            let _ = self
                .fs
                .rename(step, &self.component, &self.checkpoints, &trash);
        }
    }

    /// Removes what was made; an adopted directory stays, without a manifest. Idempotent.
    pub fn abort(&mut self) {
        let Some(draft) = self.draft.take() else {
            return;
        };
        // Best effort: what stays is a temporary, swept once its maker is gone.
        if draft.adopted {
            let _ = self.fs.unlink(&draft.dir, MANIFEST);
        } else {
            let _ = remove_tree(&self.fs, &draft.parent, &draft.name);
        }
    }
}

impl<F: Fs> Drop for Commit<F> {
    fn drop(&mut self) {
        self.abort();
    }
}

fn check_component(component: &str) -> Result<()> {
    check_path(component).map_err(|why| Error::invalid("commit", component, why))?;
    if component.contains('/') {
        return Err(Error::invalid(
            "commit",
            component,
            "a component has a plain name",
        ));
    }
    Ok(())
}

fn write_synced<F: Fs>(fs: &F, dir: &F::Dir, name: &str, data: &[u8]) -> Io<()> {
    whole::new_file(fs, dir, name, false, |file| {
        whole::write_all(fs, file, data, 0)?;
        fs.sync_file(file)
    })
}

fn pin_one<F: Fs>(
    store: &Store<F>,
    from: &F::Dir,
    to: &F::Dir,
    file: &str,
    durable: bool,
    copy: bool,
) -> Result<(u64, Pinned)> {
    let (fs, name) = (&store.fs, split_path(file).1);
    let linked = if copy {
        Err(Errno::XDEV)
    } else {
        fs.link(from, name, to, name)
    };
    match linked {
        Ok(()) => {
            let check = || {
                if durable {
                    let stat = fs.stat(to, name).context("pin", file)?;
                    let wrong = whole::wrong_kind(stat.kind);
                    return wrong.map_or(Ok(stat.size), |errno| Err(Error::os("pin", file, errno)));
                }
                let open = fs.open(to, name).context("pin", file)?;
                store.sync_once(&open, file)?;
                Ok(fs.stat_file(&open).context("pin", file)?.size)
            };
            let size = check().inspect_err(|_| {
                let _ = fs.unlink(to, name);
            })?;
            Ok((size, Pinned::Link))
        }
        Err(errno) if whole::cannot_link(errno) => {
            let open = fs.open(from, name).context("pin", file)?;
            let size = whole::copy_file(fs, &open, to, name, false).context("pin", file)?;
            Ok((size, Pinned::Copy))
        }
        Err(errno) => Err(Error::os("pin", file, errno)),
    }
}

/// Calls `each` with (path, kind) of everything below `dir`, a directory before what is in it.
fn walk<F: Fs>(
    fs: &F,
    dir: &F::Dir,
    prefix: &str,
    each: &mut dyn FnMut(&str, FileKind) -> Result<()>,
) -> Result<()> {
    for (name, kind) in names_in(fs, dir).context("list", prefix)? {
        let path = if prefix.is_empty() {
            name.clone()
        } else {
            format!("{prefix}/{name}")
        };
        let kind = match kind {
            FileKind::Unknown => fs.stat(dir, &name).context("stat", &path)?.kind,
            known => known,
        };
        each(&path, kind)?;
        if kind == FileKind::Dir {
            let sub = fs.open_dir(dir, &name).context("open", &path)?;
            walk(fs, &sub, &path, each)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
