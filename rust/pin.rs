//! Pin: a second name for a payload in a checkpoint, its bytes durable.

use std::collections::BTreeMap;

use rustix::io::Errno;

use crate::commit::{Commit, PAYLOADS};
use crate::error::Context;
use crate::fs::{Fs, split_path, whole};
use crate::names::check_payload;
use crate::store::{Store, open_parents};
use crate::threads::{self, IO_THREADS};
use crate::{Error, Result};

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

impl<F: Fs> Commit<F> {
    /// Pins each (file of a version directory, already durable): (size, how). The bytes are durable then; the
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
            check_payload,
        );
        let to: BTreeMap<&str, Result<F::Dir>> = from
            .keys()
            .map(|parent| (*parent, self.pin_dir(parent)))
            .collect();
        let made = threads::map(&ask, IO_THREADS, |(file, durable)| {
            check_payload(file).map_err(|why| Error::invalid("pin", *file, why))?;
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
