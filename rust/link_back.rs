//! Link back: give pinned files their names in the store again.

use std::collections::BTreeMap;

use rustix::io::Errno;

use crate::error::Context;
use crate::format::Header;
use crate::fs::real::RealFs;
use crate::fs::{FileKind, Fs, Stat, split_path, whole};
use crate::names::{Maker, check_payload};
use crate::store::{Store, open_parents};
use crate::threads::{self, IO_THREADS};
use crate::{Error, Result};

/// A pinned file as a checkpoint describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PinnedFile {
    /// Its name, relative to the pins and to the store.
    pub file: String,
    /// Its size.
    pub size: u64,
    /// Segment checksums that its header must hold; none for files without.
    pub checksums: Vec<String>,
}

/// What linking a pin back took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkedBack {
    /// The right file has the name already.
    Present,
    /// A link to the pin has it now.
    Linked,
    /// A copy of the pin has it now.
    Copied,
    /// Something else had it.
    Replaced,
}

impl LinkedBack {
    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Present => "present",
            Self::Linked => "linked",
            Self::Copied => "copied",
            Self::Replaced => "replaced",
        }
    }
}

const OP: &str = "link back";

/// What a file needs: nothing, as it is there; or its good pin, in the place of something else or not.
enum Need<'a, D> {
    Nothing,
    Pin { from: &'a D, replaces: bool },
}

impl Store<RealFs> {
    /// [`Store::link_back`], or with `dry_run` [`Store::would_link_back`], from a directory of the real
    /// filesystem. One that is missing holds no pin: what is there is present all the same.
    pub fn link_back_path(
        &self,
        pins: &str,
        files: &[PinnedFile],
        copy: bool,
        dry_run: bool,
    ) -> Result<Vec<Result<LinkedBack>>> {
        let dir = match self.fs.open_root(pins, false) {
            Err(Errno::NOENT) => None,
            other => Some(other.context(OP, pins)?),
        };
        Ok(if dry_run {
            self.would_link_back(dir.as_ref(), files)
        } else {
            self.link_back(dir.as_ref(), files, copy)
        })
    }
}

impl<F: Fs> Store<F> {
    /// Gives each file of the directory `pins` its name in the store again; one result per file.
    ///
    /// Only files of version directories. A bad pin is an error and never gets a name. Doing it twice changes nothing.
    pub fn link_back(
        &self,
        pins: Option<&F::Dir>,
        files: &[PinnedFile],
        copy: bool,
    ) -> Vec<Result<LinkedBack>> {
        let maker = Maker::current();
        let to = |parent: &str| self.ensure_parent(parent).map(Some);
        self.back(pins, files, to, |from, to, pinned| {
            self.link_one(from, to.as_ref(), pinned, &maker, copy)
        })
    }

    /// What [`Store::link_back`] would answer, with nothing touched; `Linked` where it would have to
    /// copy, too.
    pub fn would_link_back(
        &self,
        pins: Option<&F::Dir>,
        files: &[PinnedFile],
    ) -> Vec<Result<LinkedBack>> {
        let to = |parent: &str| match self.fs.open_dir(&self.dir, parent) {
            Err(Errno::NOENT) => Ok(None),
            other => other.context(OP, parent).map(Some),
        };
        self.back(pins, files, to, |from, to, pinned| {
            Ok(match self.need(from, to.as_ref(), pinned)? {
                Need::Nothing => LinkedBack::Present,
                Need::Pin { replaces: true, .. } => LinkedBack::Replaced,
                Need::Pin { .. } => LinkedBack::Linked,
            })
        })
    }

    /// Opens the parents of all files once each (those of the store by `open`) and lets `each` answer.
    fn back<D: Sync + Send>(
        &self,
        pins: Option<&F::Dir>,
        files: &[PinnedFile],
        open: impl Fn(&str) -> Result<D>,
        each: impl Fn(Result<&F::Dir>, &D, &PinnedFile) -> Result<LinkedBack> + Sync,
    ) -> Vec<Result<LinkedBack>> {
        let names = || files.iter().map(|pinned| pinned.file.as_str());
        let allowed = || names().filter(|name| check_payload(name).is_ok());
        let from = match pins {
            Some(pins) => open_parents(&self.fs, pins, names(), check_payload),
            None => allowed()
                .map(|name| (split_path(name).0, Err(Errno::NOENT)))
                .collect(),
        };
        let to: BTreeMap<&str, Result<D>> =
            from.keys().map(|parent| (*parent, open(parent))).collect();
        // A file asked for twice is answered once, so that no two threads work on one name.
        let once: BTreeMap<&str, &PinnedFile> = names().zip(files).collect();
        let once: Vec<(&str, &PinnedFile)> = once.into_iter().collect();
        let results = threads::map(&once, IO_THREADS, |(file, pinned)| {
            check_payload(file).map_err(|why| Error::invalid(OP, *file, why))?;
            let parent = split_path(file).0;
            let to = to[parent].as_ref().map_err(Clone::clone)?;
            let from = from[parent]
                .as_ref()
                .map_err(|errno| Error::os(OP, *file, *errno));
            each(from, to, pinned)
        });
        let results: BTreeMap<&str, Result<LinkedBack>> = once
            .into_iter()
            .map(|(file, _)| file)
            .zip(results)
            .collect();
        names().map(|file| results[file].clone()).collect()
    }

    fn ensure_parent(&self, parent: &str) -> Result<F::Dir> {
        let make = || {
            let mut dir = self.fs.open_dir(&self.dir, "")?;
            for part in parent.split('/').filter(|part| !part.is_empty()) {
                dir = whole::ensure_dir(&self.fs, &dir, part, self.group)?;
            }
            Ok(dir)
        };
        make().context(OP, parent)
    }

    /// Looks at a file and its pin. `to` is None where the store has no such directory.
    fn need<'a>(
        &self,
        from: Result<&'a F::Dir>,
        to: Option<&F::Dir>,
        pinned: &PinnedFile,
    ) -> Result<Need<'a, F::Dir>> {
        let (file, name) = (pinned.file.as_str(), split_path(&pinned.file).1);
        let there = match to.map(|to| (to, self.fs.stat(to, name))) {
            Some((to, Ok(stat))) => Some((to, stat)),
            None | Some((_, Err(Errno::NOENT))) => None,
            Some((_, Err(errno))) => return Err(Error::os(OP, file, errno)),
        };
        let pin = from.and_then(|from| {
            let stat = self.fs.stat(from, name).context(OP, file)?;
            self.vet(from, stat, pinned)?;
            Ok((from, stat))
        });
        if let Some((to, there)) = there {
            let same = |(_, pin): &(_, Stat)| (pin.dev, pin.ino) == (there.dev, there.ino);
            if pin.as_ref().is_ok_and(same) || self.vet(to, there, pinned).is_ok() {
                return Ok(Need::Nothing);
            }
        }
        let replaces = there.is_some();
        pin.map(|(from, _)| Need::Pin { from, replaces })
    }

    fn link_one(
        &self,
        from: Result<&F::Dir>,
        to: Option<&F::Dir>,
        pinned: &PinnedFile,
        maker: &Maker,
        copy: bool,
    ) -> Result<LinkedBack> {
        let (file, name) = (pinned.file.as_str(), split_path(&pinned.file).1);
        let (Need::Pin { from, replaces }, Some(to)) = (self.need(from, to, pinned)?, to) else {
            return Ok(LinkedBack::Present);
        };
        // Under a temporary name first: what had the name is replaced at once or not at all.
        let temporary = maker.temporary();
        let linked = if copy {
            Err(Errno::XDEV)
        } else {
            self.fs.link(from, name, to, &temporary)
        };
        let how = match linked {
            Ok(()) => LinkedBack::Linked,
            Err(errno) if whole::cannot_link(errno) => {
                let open = self.fs.open(from, name).context(OP, file)?;
                whole::copy_file(&self.fs, &open, to, &temporary, self.group).context(OP, file)?;
                LinkedBack::Copied
            }
            Err(errno) => return Err(Error::os(OP, file, errno)),
        };
        self.fs
            .rename(to, &temporary, to, name)
            .context(OP, file)
            .inspect_err(|_| {
                let _ = self.fs.unlink(to, &temporary);
            })?;
        Ok(if replaces { LinkedBack::Replaced } else { how })
    }

    /// Whether this is the file that was pinned, by size and header; no payload byte is read.
    fn vet(&self, dir: &F::Dir, stat: Stat, pinned: &PinnedFile) -> Result<()> {
        let (file, name) = (pinned.file.as_str(), split_path(&pinned.file).1);
        let bad = |why: String| Err(Error::corrupt(OP, file, why));
        if stat.kind != FileKind::File {
            return bad("it is not a regular file".into());
        }
        if stat.size != pinned.size {
            return bad(format!(
                "it has {} bytes, {} were pinned",
                stat.size, pinned.size
            ));
        }
        if pinned.checksums.iter().any(|checksum| !checksum.is_empty()) {
            let open = self.fs.open(dir, name).context(OP, file)?;
            if !Header::read(&self.fs, &open, file)?.holds(&pinned.checksums) {
                return bad("its header holds other checksums than those that were pinned".into());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::fs::sim::{Handle, SimFs};
    use crate::publish::tests::{models, payload, sim_store};

    /// A store with one published file and a durable link of it in `pins/`.
    fn start() -> (SimFs, Handle, PinnedFile) {
        let fs = SimFs::new();
        let published = sim_store(&fs)
            .unwrap()
            .publish(&[payload(3, b"abc")], true)
            .remove(0);
        let published = published.unwrap();
        let pins = whole::ensure_dir(&fs, &fs.root(), "pins", false).unwrap();
        let dir = whole::ensure_dir(&fs, &pins, "v3", false).unwrap();
        let (parent, name) = split_path(&published.file);
        fs.link(&fs.open_dir(&fs.root(), parent).unwrap(), name, &dir, name)
            .unwrap();
        for dir in [dir, pins, fs.root()] {
            fs.sync_dir(&dir).unwrap();
        }
        let size = fs.files()[&published.file].len() as u64;
        let checksums = vec![published.tensors[0].1.clone()];
        (
            fs,
            pins,
            PinnedFile {
                file: published.file,
                size,
                checksums,
            },
        )
    }

    fn drop_live(fs: &SimFs, pinned: &PinnedFile) {
        let store = sim_store(fs).unwrap();
        store
            .reclaim(std::slice::from_ref(&pinned.file))
            .unwrap()
            .remove(0)
            .unwrap();
    }

    fn back(fs: &SimFs, pins: Handle, pinned: &PinnedFile, copy: bool) -> Result<LinkedBack> {
        let (store, files) = (sim_store(fs)?, std::slice::from_ref(pinned));
        let (before, operations) = (fs.files(), fs.operations());
        let would = store.would_link_back(Some(&pins), files).remove(0);
        // Promise: a dry run writes nothing and gives the answer of the real one.
        assert_eq!((fs.files(), fs.operations()), (before, operations));
        let done = store.link_back(Some(&pins), files, copy).remove(0);
        match (&done, &would) {
            (Ok(LinkedBack::Copied), Ok(LinkedBack::Linked)) => {}
            // What the tests make fail.
            (Err(error), Ok(_)) => {
                assert!(matches!(error.errno(), Some(Errno::NOSPC | Errno::IO)));
            }
            _ => assert_eq!(done, would),
        }
        done
    }

    fn overwrite(fs: &SimFs, path: &str, bytes: &[u8]) {
        let (parent, name) = split_path(path);
        let dir = fs.open_dir(&fs.root(), parent).unwrap();
        let _ = fs.unlink(&dir, name);
        let file = fs.create(&dir, name, 0o666).unwrap();
        fs.write_at(&file, bytes, 0).unwrap();
    }

    #[test]
    fn names_come_back_by_link_copy_or_replacement() {
        // Promise: present is told by inode or by size and checksums; anything else is replaced.
        let (fs, pins, pinned) = start();
        let want = fs.files()[&pinned.file].clone();
        assert_eq!(back(&fs, pins, &pinned, false), Ok(LinkedBack::Present));
        drop_live(&fs, &pinned);
        assert_eq!(back(&fs, pins, &pinned, false), Ok(LinkedBack::Linked));
        assert_eq!(back(&fs, pins, &pinned, false), Ok(LinkedBack::Present));
        overwrite(&fs, &pinned.file, &want);
        assert_eq!(back(&fs, pins, &pinned, false), Ok(LinkedBack::Present));
        overwrite(&fs, &pinned.file, &vec![0; want.len()]);
        assert_eq!(back(&fs, pins, &pinned, false), Ok(LinkedBack::Replaced));
        overwrite(&fs, &pinned.file, b"");
        assert_eq!(back(&fs, pins, &pinned, true), Ok(LinkedBack::Replaced));
        drop_live(&fs, &pinned);
        fs.refuse_links(true);
        assert_eq!(back(&fs, pins, &pinned, false), Ok(LinkedBack::Copied));
        assert_eq!(fs.files()[&pinned.file], want);
        for model in models() {
            assert_eq!(
                fs.power_cut(model).files()[&format!("pins/{}", pinned.file)],
                want
            );
        }
    }

    #[test]
    fn a_bad_pin_gets_no_name() {
        // Promise: torn, edited, other or missing pins are errors; what is right in the store stays.
        let (fs, pins, pinned) = start();
        let pin = format!("pins/{}", pinned.file);
        let want = fs.files()[&pin].clone();
        let mut other = pinned.clone();
        other.checksums.push("0123456789abcdef".into());
        assert!(matches!(
            back(&fs, pins, &other, false).unwrap_err().kind,
            crate::error::Kind::Corrupt(_)
        ));
        overwrite(&fs, &pin, &vec![0; want.len()]);
        assert_eq!(back(&fs, pins, &pinned, false), Ok(LinkedBack::Present));
        drop_live(&fs, &pinned);
        for bytes in [vec![], vec![0; want.len()], want[..want.len() - 1].to_vec()] {
            overwrite(&fs, &pin, &bytes);
            let error = back(&fs, pins, &pinned, false).unwrap_err();
            assert!(
                matches!(error.kind, crate::error::Kind::Corrupt(_)),
                "{error}"
            );
        }
        fs.unlink(
            &fs.open_dir(&pins, "v3").unwrap(),
            split_path(&pinned.file).1,
        )
        .unwrap();
        let error = back(&fs, pins, &pinned, false).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::NOENT));
        let bad = PinnedFile {
            file: "../x".into(),
            ..pinned.clone()
        };
        assert!(back(&fs, pins, &bad, false).is_err());
        assert!(!fs.files().contains_key(&pinned.file));
    }

    #[test]
    fn the_stores_own_files_are_no_targets() {
        // Bug guarded: a manifest that listed "STORE" had the identity of the store replaced.
        let (fs, pins, _) = start();
        for file in ["STORE", "LOCK", "x/y", "v3/x/y", "w/STORE"] {
            let (parent, name) = split_path(file);
            let mut dir = pins;
            for part in parent.split('/').filter(|part| !part.is_empty()) {
                dir = whole::ensure_dir(&fs, &dir, part, false).unwrap();
            }
            fs.create(&dir, name, 0o666).unwrap();
            let before = fs.files();
            let pinned = PinnedFile {
                file: file.into(),
                size: 0,
                checksums: Vec::new(),
            };
            let error = back(&fs, pins, &pinned, false).unwrap_err();
            assert!(
                matches!(error.kind, crate::error::Kind::Invalid(_)),
                "{error}"
            );
            assert_eq!(fs.files(), before);
        }
    }

    #[test]
    fn stopped_anywhere_it_can_be_done_again() {
        // Promise: a kill during a restore leaves the name absent, as it was or right; the next
        // restore completes it and the pin is untouched. Errors leave no temporary.
        for copy in [false, true] {
            let (first, pins, pinned) = start();
            let want = first.files()[&pinned.file].clone();
            overwrite(&first, &pinned.file, b"wrong");
            let whole = first.kill();
            back(&whole, pins, &pinned, copy).unwrap();
            for n in 1..=whole.operations() {
                let fs = first.kill();
                fs.stop_at(n);
                let done = back(&fs, pins, &pinned, copy).is_ok();
                let after = fs.kill();
                let now = &after.files()[&pinned.file];
                assert!(*now == want || *now == b"wrong" && !done);
                back(&after, pins, &pinned, copy).unwrap();
                assert_eq!(after.files()[&pinned.file], want);
                let fs = first.kill();
                fs.fail_at(n, Errno::NOSPC);
                let failed = back(&fs, pins, &pinned, copy).is_err();
                assert_eq!(failed, n < whole.operations());
                assert!(!fs.files().keys().any(|path| path.contains(".tmp-")));
            }
        }
    }
}
