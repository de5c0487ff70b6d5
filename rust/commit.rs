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

use std::collections::HashMap;

use rustix::io::Errno;

use crate::error::Context;
use crate::format::{hex16, xxh3};
use crate::fs::real::RealFs;
use crate::fs::{FileKind, Fs, Io, check_path, whole};
use crate::names::Maker;
use crate::pin::Pinned;
use crate::root::{remove_tree, taken};
use crate::sweep::names_in;
use crate::threads::{self, IO_THREADS};
use crate::{Error, Result};

const MANIFEST: &str = "manifest.json";
pub(crate) const PAYLOADS: &str = "payloads";

/// Where the component is before it has its name.
pub(crate) struct Draft<F: Fs> {
    parent: F::Dir,
    name: String,
    pub(crate) dir: F::Dir,
    adopted: bool,
}

/// A checkpoint component on its way.
pub struct Commit<F: Fs> {
    pub(crate) fs: F,
    checkpoints: F::Dir,
    path: String,
    step: u64,
    component: String,
    draft: Option<Draft<F>>,
    /// What is pinned already, by file: asking twice gives the first answer.
    pub(crate) pinned: HashMap<String, (u64, Pinned)>,
    /// A step that failed leaves a component nobody can vouch for.
    broken: bool,
    /// A forked child drops its copy without removing what its parent still builds.
    pid: u32,
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
        // So that an abort may remove the manifest that it finds.
        if fs.stat(&dir, MANIFEST) != Err(Errno::NOENT) {
            let error = Error::os("commit", format!("{name}/{MANIFEST}"), Errno::EXIST);
            return Err(error.with_hint("the manifest is written by the commit"));
        }
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
        let (draft, pinned) = (Some(draft), HashMap::new());
        Self {
            fs,
            checkpoints,
            path,
            step,
            component,
            draft,
            pinned,
            broken: false,
            pid: std::process::id(),
        }
    }

    pub(crate) fn draft(&self, op: &'static str) -> Result<&Draft<F>> {
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
        if self.pid == std::process::id() {
            self.abort();
        }
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
