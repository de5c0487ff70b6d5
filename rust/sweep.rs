//! What lies in the version directories, and removing a whole one.

use std::ops::ControlFlow;

use rustix::io::Errno;

use crate::error::Context;
use crate::fs::{FileKind, Fs, Io};
use crate::names::{Maker, TEMPORARY, TRASH, owner_is_dead, version_of};
use crate::root::remove_tree;
use crate::store::Store;
use crate::threads::{self, IO_THREADS};
use crate::{Error, Result};

/// What a file in a version directory is to a sweep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// A payload file by its name.
    Payload,
    /// A temporary whose writer may be alive.
    Temporary,
    /// A temporary whose writer is gone.
    Dead,
    /// Not ours: never touched.
    Foreign,
}

impl Found {
    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Payload => "payload",
            Self::Temporary => "temporary",
            Self::Dead => "dead",
            Self::Foreign => "foreign",
        }
    }

    fn of(name: &str, kind: FileKind) -> Self {
        if kind != FileKind::File {
            return Self::Foreign;
        }
        if name.starts_with(TEMPORARY) {
            return if owner_is_dead(name) {
                Self::Dead
            } else {
                Self::Temporary
            };
        }
        let hex = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
        match name.strip_suffix(".safetensors") {
            Some(unique) if unique.len() == 32 && unique.bytes().all(hex) => Self::Payload,
            _ => Self::Foreign,
        }
    }
}

/// A file in a version directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scanned {
    /// Its name relative to the store.
    pub file: String,
    /// Its size.
    pub size: u64,
    /// Its modification time in nanoseconds since the epoch, by the server's clock.
    pub mtime_ns: i128,
    /// What it is.
    pub found: Found,
}

impl<F: Fs> Store<F> {
    /// The version directories, ascending.
    pub fn versions(&self) -> Result<Vec<u64>> {
        let mut versions = Vec::new();
        for (name, kind) in self.entries().context("list", self.root())? {
            let Some(version) = version_of(&name) else {
                continue;
            };
            let is_dir = match kind {
                FileKind::Unknown => {
                    let stat = self.fs.stat(&self.dir, &name).context("list", &name)?;
                    stat.kind == FileKind::Dir
                }
                known => known == FileKind::Dir,
            };
            if is_dir {
                versions.push(version);
            }
        }
        versions.sort_unstable();
        Ok(versions)
    }

    /// Everything in the version directories, in order of version and name. A file that goes away
    /// meanwhile is left out; any other error is one, so that no sweep acts on half a picture.
    pub fn scan(&self) -> Result<Vec<Scanned>> {
        let mut all = Vec::new();
        for version in self.versions()? {
            let prefix = format!("v{version}");
            let dir = match self.fs.open_dir(&self.dir, &prefix) {
                Err(Errno::NOENT) => continue,
                other => other.context("scan", &prefix)?,
            };
            let mut names = names_in(&self.fs, &dir).context("scan", &prefix)?;
            names.sort_unstable_by(|a, b| a.0.cmp(&b.0));
            let scanned = threads::map(&names, IO_THREADS, |(name, _)| {
                let file = format!("{prefix}/{name}");
                match self.fs.stat(&dir, name) {
                    Err(Errno::NOENT) => Ok(None),
                    Err(errno) => Err(Error::os("scan", file, errno)),
                    Ok(stat) => {
                        let found = Found::of(name, stat.kind);
                        let (size, mtime_ns) = (stat.size, stat.mtime_ns);
                        Ok(Some(Scanned {
                            file,
                            size,
                            mtime_ns,
                            found,
                        }))
                    }
                }
            });
            for one in scanned {
                all.extend(one?);
            }
        }
        Ok(all)
    }

    /// Takes version directory `v<version>` out of the store by one rename, so that a writer inside notices
    /// and nobody sees half of it; whether it was there. [`Store::empty_trash`] frees the space. Owner only.
    pub fn retire(&self, version: u64) -> Result<bool> {
        self.require_owner("retire")?;
        let name = format!("v{version}");
        let trash = Maker::current().trash(&name);
        match self.fs.rename(&self.dir, &name, &self.dir, &trash) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(Error::os("retire", name, errno)),
        }
    }

    /// Removes what was retired, by this owner or one before it; the number of files. Owner only.
    pub fn empty_trash(&self) -> Result<u64> {
        self.require_owner("empty trash")?;
        let mut removed = 0;
        for (name, _) in self.entries().context("empty trash", self.root())? {
            if name.starts_with(TRASH) {
                removed += remove_tree(&self.fs, &self.dir, &name)?;
            }
        }
        Ok(removed)
    }

    fn entries(&self) -> Io<Vec<(String, FileKind)>> {
        names_in(&self.fs, &self.fs.open_dir(&self.dir, "")?)
    }
}

/// The entries of a directory.
pub(crate) fn names_in<F: Fs>(fs: &F, dir: &F::Dir) -> Io<Vec<(String, FileKind)>> {
    let mut names = Vec::new();
    fs.list(dir, &mut |name, kind| {
        names.push((name.to_string(), kind));
        ControlFlow::Continue(())
    })?;
    Ok(names)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::fs::real::RealFs;
    use crate::names::temporary_name;
    use crate::publish::tests::payload;
    use crate::store::StoreOptions;

    fn store(path: &std::path::Path) -> Store<RealFs> {
        let options = StoreOptions {
            create: true,
            owner: true,
            ..StoreOptions::default()
        };
        Store::<RealFs>::open_path(path.to_str().unwrap(), &options).unwrap()
    }

    #[test]
    fn a_scan_tells_ours_from_others() {
        // Promise: payloads, temporaries, dead temporaries and foreign things are told apart.
        let temp = tempfile::tempdir().unwrap();
        let store = store(temp.path());
        let file = store
            .publish(&[payload(10, b"x")], false)
            .remove(0)
            .unwrap()
            .file;
        let v10 = temp.path().join("v10");
        let own = temporary_name();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let mut parts: Vec<_> = own.split('-').map(String::from).collect();
        parts[2] = child.id().to_string();
        let dead = parts.join("-");
        for name in [&own, &dead, "model.safetensors", ".nfs0001"] {
            std::fs::write(v10.join(name), "1").unwrap();
        }
        std::fs::create_dir(v10.join("dir")).unwrap();
        std::os::unix::fs::symlink("x", v10.join(format!("{}.safetensors", "0".repeat(32))))
            .unwrap();
        for name in ["v2", "v02", "vx", "v", ".trash-v3"] {
            std::fs::create_dir(temp.path().join(name)).unwrap();
        }
        assert_eq!(store.versions().unwrap(), [2, 10]);
        let found: std::collections::BTreeMap<_, _> = store
            .scan()
            .unwrap()
            .into_iter()
            .map(|one| (one.file, one.found))
            .collect();
        assert_eq!(found.len(), 7);
        assert_eq!(found[&file], Found::Payload);
        assert_eq!(found[&format!("v10/{own}")], Found::Temporary);
        assert_eq!(found[&format!("v10/{dead}")], Found::Dead);
        let foreign = found
            .values()
            .filter(|found| **found == Found::Foreign)
            .count();
        assert_eq!(foreign, 4);
    }

    #[test]
    fn retire_removes_a_version_and_follows_no_link() {
        // Promise: the whole directory goes, with links in it but not what they point to; a second
        // time is fine, and leftovers of a retire that was killed go too.
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("store");
        let store = store(&path);
        store.publish(
            &[payload(1, b"x"), payload(1, b"y"), payload(2, b"z")],
            false,
        );
        let outside = temp.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("f"), "1").unwrap();
        std::os::unix::fs::symlink(&outside, path.join("v1/link")).unwrap();
        std::fs::create_dir_all(path.join(".trash-v0-a/b")).unwrap();
        assert!(store.retire(1).unwrap());
        assert_eq!(store.versions().unwrap(), [2]);
        assert!(!store.retire(1).unwrap());
        assert_eq!(store.empty_trash().unwrap(), 3);
        assert_eq!(store.empty_trash().unwrap(), 0);
        assert!(outside.join("f").exists());
        assert!(!path.join(".trash-v0-a").exists());
    }
}
