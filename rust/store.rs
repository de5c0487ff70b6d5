//! The store directory: who it is (`STORE`), who may delete in it (`LOCK`), and its open handle.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::error::Context;
use crate::format::Header;
use crate::fs::real::RealFs;
use crate::fs::{Fs, Io, check_path, split_path, whole};
use crate::names::{Maker, unique};
use crate::threads::{self, IO_THREADS};
use crate::{Error, Result};

const STORE: &str = "STORE";
const LOCK: &str = "LOCK";
const FORMAT: u64 = 1;
/// How often an empty `STORE` is read again, 10 ms apart, until it counts as torn.
const TURNS: u32 = 100;

/// How a store is opened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoreOptions {
    /// Make it if it is none yet.
    pub create: bool,
    /// Take its lock: only the owner deletes.
    pub owner: bool,
    /// The run that it belongs to; "" takes what is there.
    pub run_id: String,
    /// Files 0664 and directories 02775, whatever the umask.
    pub group_writable: bool,
}

#[derive(Serialize, Deserialize)]
struct Identity {
    format: u64,
    uuid: String,
    run_id: String,
}

/// An open store directory.
pub struct Store<F: Fs> {
    pub(crate) fs: F,
    pub(crate) dir: F::Dir,
    pub(crate) group: bool,
    root: String,
    identity: Identity,
    lock: Option<(u32, F::Lock)>,
    /// Files whose sync failed: their bytes count as lost, and they are never synced again.
    lost: Mutex<HashSet<String>>,
}

impl Store<RealFs> {
    /// Opens the store at a path of the real filesystem.
    pub fn open_path(path: &str, options: &StoreOptions) -> Result<Self> {
        let fs = RealFs::new();
        let dir = fs
            .open_root(path, options.create)
            .context("open store", path)?;
        Self::open(fs, dir, path, options)
    }
}

impl<F: Fs> Store<F> {
    /// Opens the store in `dir`; `root` is its path for messages.
    pub fn open(fs: F, dir: F::Dir, root: &str, options: &StoreOptions) -> Result<Self> {
        let identity = match read_identity(&fs, &dir, root) {
            Err(error) if error.errno() == Some(Errno::NOENT) && options.create => {
                create_identity(&fs, &dir, &options.run_id).context("create store", root)?;
                read_identity(&fs, &dir, root)
            }
            other => other,
        }?;
        if !options.run_id.is_empty() && options.run_id != identity.run_id {
            let why = format!(
                "the store belongs to run {:?}, not {:?}; two runs never share one",
                identity.run_id, options.run_id
            );
            return Err(Error::invalid("open store", root, why));
        }
        let lock = if options.owner {
            let lock = fs.lock(&dir, LOCK).map_err(|errno| {
                let hint = match errno {
                    Errno::AGAIN => {
                        "another process, or another Store of this one, owns this store"
                    }
                    Errno::INVAL | Errno::LOOP | Errno::ISDIR => {
                        "LOCK in it is no regular file: remove what is there instead"
                    }
                    Errno::ACCESS | Errno::PERM | Errno::ROFS => {
                        "its owner must be able to write LOCK"
                    }
                    _ => "the store must be on a filesystem with locks",
                };
                Error::os("lock store", root, errno).with_hint(hint)
            })?;
            Some((std::process::id(), lock))
        } else {
            None
        };
        let (root, group) = (root.to_string(), options.group_writable);
        Ok(Self {
            fs,
            dir,
            group,
            root,
            identity,
            lock,
            lost: Mutex::default(),
        })
    }

    /// The path it was opened with.
    pub fn root(&self) -> &str {
        &self.root
    }

    /// 32 hex digits.
    pub fn uuid(&self) -> &str {
        &self.identity.uuid
    }

    /// The run that it belongs to.
    pub fn run_id(&self) -> &str {
        &self.identity.run_id
    }

    /// Whether this process holds the lock; a forked child does not.
    pub fn is_owner(&self) -> bool {
        self.lock
            .as_ref()
            .is_some_and(|(pid, _)| *pid == std::process::id())
    }

    /// The filesystem.
    pub fn fs(&self) -> &F {
        &self.fs
    }

    /// The directory.
    pub fn dir(&self) -> &F::Dir {
        &self.dir
    }

    /// Refuses what only the owner may do.
    pub(crate) fn require_owner(&self, op: &'static str) -> Result<()> {
        if self.is_owner() {
            return Ok(());
        }
        let error = Error::os(op, &self.root, Errno::PERM);
        Err(error.with_hint("only the owner of a store deletes; open it with owner=True"))
    }

    /// Reads and checks the headers of files.
    pub fn header(&self, files: &[String]) -> Vec<Result<Header>> {
        self.each("header", files, check_path, |dir, name, file| {
            let open = self.fs.open(dir, name).context("open", file)?;
            Header::read(&self.fs, &open, file)
        })
    }

    /// Makes the bytes of files durable. A failed one is never tried again.
    pub fn sync(&self, files: &[String]) -> Vec<Result<()>> {
        self.each("fsync", files, check_path, |dir, name, file| {
            let open = self.fs.open(dir, name).context("fsync", file)?;
            self.sync_once(&open, file)
        })
    }

    /// Syncs a file of the store unless that has failed before.
    fn sync_once(&self, open: &F::File, file: &str) -> Result<()> {
        self.refuse_lost(file)?;
        self.fs
            .sync_file(open)
            .context("fsync", file)
            .inspect_err(|_| {
                self.lost().insert(file.to_string());
            })
    }

    /// An error if a sync of the file has failed.
    pub(crate) fn refuse_lost(&self, file: &str) -> Result<()> {
        if !self.lost().contains(file) {
            return Ok(());
        }
        let error = Error::os("fsync", file, Errno::IO);
        Err(error.with_hint("an earlier fsync failed, its bytes count as lost"))
    }

    fn lost(&self) -> MutexGuard<'_, HashSet<String>> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `act` with (directory, name, file) for every file on bounded threads; each parent is
    /// opened once.
    pub(crate) fn each<R: Send>(
        &self,
        op: &'static str,
        files: &[String],
        check: Check,
        act: impl Fn(&F::Dir, &str, &str) -> Result<R> + Sync,
    ) -> Vec<Result<R>> {
        let parents = open_parents(&self.fs, &self.dir, files.iter().map(String::as_str), check);
        threads::map(files, IO_THREADS, |file| {
            in_its_parent(&parents, op, file, check, &act)
        })
    }

    /// As [`Store::each`], by one thread at a time in a directory: the kernel locks it for whoever changes
    /// it, and what waits for that lock burns its core.
    pub(crate) fn in_turn<R: Send>(
        &self,
        op: &'static str,
        files: &[&str],
        check: Check,
        act: impl Fn(&F::Dir, &str, &str) -> Result<R> + Sync,
    ) -> Vec<Result<R>> {
        let parents = open_parents(&self.fs, &self.dir, files.iter().copied(), check);
        let groups = group(files.iter().copied());
        let done = threads::map_long(&groups, IO_THREADS, |group, judge| {
            let one = |&index: &usize| {
                let result = in_its_parent(&parents, op, files[index], check, &act);
                judge();
                result
            };
            group.indices.iter().map(one).collect::<Vec<_>>()
        });
        let mut results: Vec<Option<Result<R>>> = files.iter().map(|_| None).collect();
        for (group, done) in groups.iter().zip(done) {
            for (index, result) in group.indices.iter().zip(done) {
                results[*index] = Some(result);
            }
        }
        results
            .into_iter()
            .map(|result| result.expect("every file is in a group"))
            .collect()
    }
}

/// Calls `act` with (directory, name, file), or says why there is none.
fn in_its_parent<D, R>(
    parents: &BTreeMap<&str, Io<D>>,
    op: &'static str,
    file: &str,
    check: Check,
    act: &impl Fn(&D, &str, &str) -> Result<R>,
) -> Result<R> {
    check(file).map_err(|why| Error::invalid(op, file, why))?;
    let (parent, name) = split_path(file);
    match &parents[parent] {
        Ok(dir) => act(dir, name, file),
        Err(errno) => Err(Error::os(op, file, *errno)),
    }
}

/// Files of one directory.
pub(crate) struct Group<'a> {
    /// The directory.
    pub(crate) parent: &'a str,
    /// The places of the files in the list that was grouped.
    pub(crate) indices: Vec<usize>,
}

/// Files by their directories, in order of appearance.
pub(crate) fn group<'a>(files: impl IntoIterator<Item = &'a str>) -> Vec<Group<'a>> {
    let mut places: HashMap<&str, usize> = HashMap::new();
    let mut groups: Vec<Group<'a>> = Vec::new();
    let mut last = 0;
    for (index, file) in files.into_iter().enumerate() {
        let parent = split_path(file).0;
        if groups.get(last).is_none_or(|group| group.parent != parent) {
            last = *places.entry(parent).or_insert(groups.len());
            if last == groups.len() {
                groups.push(Group {
                    parent,
                    indices: Vec::new(),
                });
            }
        }
        groups[last].indices.push(index);
    }
    groups
}

/// Which names are allowed; why not.
pub(crate) type Check = fn(&str) -> std::result::Result<(), &'static str>;

/// Opens the parents of all allowed paths once each, beneath a freshly opened `root`: opening is
/// what makes an NFS client ask its server again.
pub(crate) fn open_parents<'a, F: Fs>(
    fs: &F,
    root: &F::Dir,
    files: impl Iterator<Item = &'a str>,
    check: Check,
) -> BTreeMap<&'a str, Io<F::Dir>> {
    let fresh = fs.open_dir(root, "");
    let mut parents = BTreeMap::new();
    for file in files.filter(|file| check(file).is_ok()) {
        let parent = split_path(file).0;
        parents.entry(parent).or_insert_with(|| match &fresh {
            Ok(root) => fs.open_dir(root, parent),
            Err(errno) => Err(*errno),
        });
    }
    parents
}

/// Makes `STORE` with its content or not at all; of several makers one wins.
fn create_identity<F: Fs>(fs: &F, dir: &F::Dir, run_id: &str) -> Io<()> {
    let identity = Identity {
        format: FORMAT,
        uuid: unique(),
        run_id: run_id.into(),
    };
    let text = serde_json::to_string(&identity).map_err(|_| Errno::INVAL)? + "\n";
    let temporary = Maker::current().temporary();
    let fill = |file: &F::File| {
        whole::write_all(fs, file, text.as_bytes(), 0)?;
        fs.sync_file(file)
    };
    whole::new_file(fs, dir, &temporary, false, fill)?;
    let made = match fs.link(dir, &temporary, dir, STORE) {
        // Without links the name appears before its content; readers wait for that a moment.
        Err(errno) if whole::cannot_link(errno) => whole::new_file(fs, dir, STORE, false, fill),
        other => other,
    };
    let removed = fs.unlink(dir, &temporary);
    match made {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(errno),
    }
    removed?;
    fs.sync_dir(dir)
}

fn read_identity<F: Fs>(fs: &F, dir: &F::Dir, root: &str) -> Result<Identity> {
    for turn in 1..=TURNS {
        let last = turn == TURNS;
        let file = fs.open(dir, STORE).map_err(|errno| {
            let error = Error::os("open store", root, errno);
            if errno == Errno::NOENT {
                error.with_hint("there is no STORE in it")
            } else {
                error
            }
        })?;
        let mut text = vec![0; 64 << 10];
        let n = whole::read_full(fs, &file, &mut text, 0).context("open store", root)?;
        if n > 0 || last {
            let found: Option<Identity> = serde_json::from_slice(&text[..n]).ok();
            let Some(identity) = found else {
                return Err(Error::corrupt(
                    "open store",
                    root,
                    "its STORE is torn or not one",
                ));
            };
            if identity.format != FORMAT {
                let why = format!("its format is {}, known is {FORMAT}", identity.format);
                return Err(Error::invalid("open store", root, why));
            }
            return Ok(identity);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    unreachable!("the last turn returns")
}

#[cfg(test)]
mod tests;
