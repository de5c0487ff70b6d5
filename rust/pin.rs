//! Pin: a second name for a payload in a checkpoint, its bytes durable.

use std::collections::{HashMap, HashSet};

use rustix::io::Errno;

use crate::commit::{Commit, PAYLOADS};
use crate::error::Context;
use crate::fs::{Fs, split_path, whole};
use crate::names::check_payload;
use crate::store::{Group, Store, group};
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
        let groups = group(ask.iter().copied());
        let allowed = |group: &&Group<'_>| {
            let mut files = group.indices.iter().map(|&index| ask[index]);
            files.any(|file| check_payload(file).is_ok())
        };
        let to: HashMap<&str, Result<F::Dir>> = groups
            .iter()
            .filter(allowed)
            .map(|group| (group.parent, self.pin_dir(group.parent)))
            .collect();
        let to_of = |file: &str| match to.get(split_path(file).0) {
            Some(to) => to.as_ref().map_err(Clone::clone),
            None => Err(Error::invalid("pin", file, "it is no payload file")),
        };
        let linked = store.in_turn("pin", &ask, check_payload, |from, name, file| {
            store.refuse_lost(file)?;
            let to = to_of(file)?;
            let made = if copy {
                Err(Errno::XDEV)
            } else {
                store.fs.link(from, name, to, name)
            };
            match made {
                Ok(()) => confirm(&store.fs, to, file).map(Some),
                Err(errno) if whole::cannot_link(errno) => Ok(None),
                Err(errno) => Err(Error::os("pin", file, errno)),
            }
        });
        // Copies wait for the disk: side by side, whatever directory they are in.
        let rest = ask.iter().zip(&linked);
        let rest: Vec<String> = rest
            .filter(|(_, linked)| matches!(linked, Ok(None)))
            .map(|(file, _)| (*file).to_string())
            .collect();
        let copied = store.each("pin", &rest, check_payload, |from, name, file| {
            let open = store.fs.open(from, name).context("pin", file)?;
            let size = whole::copy_file(&store.fs, &open, to_of(file)?, name, false);
            Ok((size.context("pin", file)?, Pinned::Copy))
        });
        let mut copied = copied.into_iter();
        let made = linked.into_iter().map(|linked| match linked {
            Ok(Some(pin)) => Ok(pin),
            Ok(None) => copied.next().expect("one result per copy"),
            Err(error) => Err(error),
        });
        let mut failed = HashMap::new();
        for (file, result) in ask.into_iter().zip(made) {
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

/// The size of a fresh link; it is taken back if it is none of a payload.
fn confirm<F: Fs>(fs: &F, to: &F::Dir, file: &str) -> Result<(u64, Pinned)> {
    let name = split_path(file).1;
    let stat = fs.stat(to, name).context("pin", file).and_then(|stat| {
        let wrong = whole::wrong_kind(stat.kind);
        wrong.map_or(Ok(stat), |errno| Err(Error::os("pin", file, errno)))
    });
    let stat = stat.inspect_err(|_| {
        let _ = fs.unlink(to, name);
    })?;
    Ok((stat.size, Pinned::Link))
}
