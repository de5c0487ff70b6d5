//! Pin: a second name for a payload in a checkpoint, its bytes durable.

use std::collections::{BTreeMap, HashMap, HashSet};

use rustix::io::Errno;

use crate::commit::{Commit, PAYLOADS};
use crate::error::Context;
use crate::fs::{Fs, split_path, whole};
use crate::names::check_payload;
use crate::store::{Store, in_turn, open_parents};
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
    /// Pins each file of a version directory, whose bytes are durable already: (size, how). The names are
    /// durable with [`Commit::finish`], and so are the bytes of a copy.
    pub fn pin(
        &mut self,
        store: &Store<F>,
        files: &[String],
        copy: bool,
    ) -> Vec<Result<(u64, Pinned)>> {
        let mut seen = HashSet::new();
        let names = files.iter().map(String::as_str);
        let ask: Vec<&str> = names
            .filter(|file| !self.pinned.contains_key(*file) && seen.insert(*file))
            .collect();
        let from = open_parents(&store.fs, &store.dir, ask.iter().copied(), check_payload);
        let to: BTreeMap<&str, Result<F::Dir>> = from
            .keys()
            .map(|parent| (*parent, self.pin_dir(parent)))
            .collect();
        let dirs = |file| {
            check_payload(file).map_err(|why| Error::invalid("pin", file, why))?;
            let (parent, name) = split_path(file);
            let from = from[parent]
                .as_ref()
                .map_err(|errno| Error::os("pin", file, *errno))?;
            let to = to[parent].as_ref().map_err(Clone::clone)?;
            Ok((from, to, name))
        };
        let fs = &store.fs;
        let linked = in_turn(ask.iter().copied(), |index| {
            let (from, to, name) = dirs(ask[index])?;
            store.refuse_lost(ask[index])?;
            Ok(if copy {
                Err(Errno::XDEV)
            } else {
                fs.link(from, name, to, name)
            })
        });
        let work: Vec<_> = ask.into_iter().zip(linked).collect();
        // Looking and copying lock no directory for long.
        let made = threads::map(&work, IO_THREADS, |(file, linked)| {
            let linked = linked.as_ref().map_err(Clone::clone)?;
            let (from, to, name) = dirs(*file)?;
            match *linked {
                Ok(()) => {
                    let stat = fs.stat(to, name).context("pin", file).and_then(|stat| {
                        let wrong = whole::wrong_kind(stat.kind);
                        wrong.map_or(Ok(stat), |errno| Err(Error::os("pin", *file, errno)))
                    });
                    let stat = stat.inspect_err(|_| {
                        let _ = fs.unlink(to, name);
                    })?;
                    Ok((stat.size, Pinned::Link))
                }
                Err(errno) if whole::cannot_link(errno) => {
                    let open = fs.open(from, name).context("pin", file)?;
                    let size = whole::copy_file(fs, &open, to, name, false).context("pin", file)?;
                    Ok((size, Pinned::Copy))
                }
                Err(errno) => Err(Error::os("pin", *file, errno)),
            }
        });
        let mut failed = HashMap::new();
        for ((file, _), result) in work.into_iter().zip(made) {
            match result {
                Ok(pin) => drop(self.pinned.insert(file.to_string(), pin)),
                Err(error) => drop(failed.insert(file, error)),
            }
        }
        let result = |file: &String| match self.pinned.get(file) {
            Some(pin) => Ok(*pin),
            None => Err(failed[file.as_str()].clone()),
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
