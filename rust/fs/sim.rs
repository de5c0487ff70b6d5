//! A disk in memory for tests: what processes see (volatile) and what a power cut leaves (durable).

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::{FileKind, Fs, Io, Stat, split_path};
use crate::format::xxh3;

/// What a power cut does to what was not synced. Synced data and synced entries always survive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PowerCut {
    /// Every unsynced change of a directory is lost; unsynced files are empty.
    Lost,
    /// Every change of a directory survives; unsynced files are empty (ext4, xfs: a rename without
    /// a sync of the file).
    Kept,
    /// Every change of an entry survives or not, unsynced data is absent, cut, zeros or complete, by
    /// a coin thrown per entry and file.
    Mixed(u64),
}

/// A disk in memory. Clones share it.
#[derive(Clone)]
pub struct SimFs {
    disk: Arc<Mutex<Disk>>,
}

/// An open directory or file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handle(usize);

/// A lock of [`SimFs`].
pub struct SimLock {
    fs: SimFs,
    ino: usize,
}

impl Drop for SimLock {
    fn drop(&mut self) {
        self.fs.disk().locks.remove(&self.ino);
    }
}

type Hook = Box<dyn FnOnce(&SimFs) + Send>;

#[derive(Default)]
struct Disk {
    nodes: Vec<Node>,
    locks: HashSet<usize>,
    operations: u64,
    fault: Option<(u64, Errno)>,
    stop: Option<u64>,
    hook: Option<(u64, Hook)>,
    cannot_link: bool,
    synced_again: bool,
    ignore: Option<u64>,
    ignored: bool,
}

#[derive(Clone)]
enum Node {
    File {
        data: Vec<u8>,
        durable: Option<Vec<u8>>,
        poisoned: bool,
        mode: u32,
    },
    Dir {
        entries: Entries,
        durable: Entries,
        parent: Option<usize>,
        mode: u32,
    },
}

type Entries = BTreeMap<String, usize>;

impl Node {
    fn dir(parent: Option<usize>, mode: u32) -> Self {
        Self::Dir {
            entries: Entries::new(),
            durable: Entries::new(),
            parent,
            mode,
        }
    }
}

impl Default for SimFs {
    fn default() -> Self {
        Self::new()
    }
}

impl SimFs {
    /// An empty disk.
    pub fn new() -> Self {
        Self::of(vec![Node::dir(None, 0o755)])
    }

    fn of(nodes: Vec<Node>) -> Self {
        Self {
            disk: Arc::new(Mutex::new(Disk {
                nodes,
                ..Disk::default()
            })),
        }
    }

    /// Its root directory.
    pub fn root(&self) -> Handle {
        Handle(0)
    }

    /// How many changing operations were asked for.
    pub fn operations(&self) -> u64 {
        self.disk().operations
    }

    /// Operation `n` (from 0, counted as in [`SimFs::operations`]) fails and has no effect.
    pub fn fail_at(&self, n: u64, errno: Errno) {
        self.disk().fault = Some((n, errno));
    }

    /// Operation `n` and everything after it fails: the process dies there.
    pub fn stop_at(&self, n: u64) {
        self.disk().stop = Some(n);
    }

    /// Calls `hook` just before operation `n`: another process gets in between.
    pub fn before(&self, n: u64, hook: impl FnOnce(&SimFs) + Send + 'static) {
        self.disk().hook = Some((n, Box::new(hook)));
    }

    /// Whether hard links are refused with `EPERM`.
    pub fn refuse_links(&self, refuse: bool) {
        self.disk().cannot_link = refuse;
    }

    /// Whether a file was synced again after that had failed: a mistake no caller may make.
    pub fn synced_again(&self) -> bool {
        self.disk().synced_again
    }

    /// Operation `n`, if it is a sync, does nothing and says that it did: for ablations.
    pub fn ignore_sync_at(&self, n: u64) {
        self.disk().ignore = Some(n);
    }

    /// Whether a sync was left out.
    pub fn ignored_sync(&self) -> bool {
        self.disk().ignored
    }

    /// What is left when the process is killed: everything.
    #[must_use]
    pub fn kill(&self) -> Self {
        Self::of(self.disk().nodes.clone())
    }

    /// What is left when the power goes.
    #[must_use]
    pub fn power_cut(&self, model: PowerCut) -> Self {
        let disk = self.disk();
        let coin = |text: &str| match model {
            PowerCut::Lost | PowerCut::Kept => 0,
            PowerCut::Mixed(seed) => xxh3(format!("{seed} {text}").as_bytes()) % 4,
        };
        let after = |(ino, node): (usize, &Node)| match node {
            Node::File {
                data,
                durable,
                mode,
                ..
            } => {
                let kept = durable
                    .clone()
                    .unwrap_or_else(|| match coin(&format!("file {ino}")) {
                        1 => data[..data.len() / 2].to_vec(),
                        2 => vec![0; data.len()],
                        3 => data.clone(),
                        _ => Vec::new(),
                    });
                Node::File {
                    data: kept.clone(),
                    durable: Some(kept),
                    poisoned: false,
                    mode: *mode,
                }
            }
            Node::Dir {
                entries,
                durable,
                parent,
                mode,
            } => {
                let names: BTreeSet<_> = entries.keys().chain(durable.keys()).collect();
                let pick = |name: &&String| {
                    let now = match model {
                        PowerCut::Lost => false,
                        PowerCut::Kept => true,
                        PowerCut::Mixed(_) => coin(&format!("entry {ino} {name}")) % 2 == 0,
                    };
                    let from = if now { entries } else { durable };
                    from.get(*name).map(|ino| ((*name).clone(), *ino))
                };
                let kept: Entries = names.iter().filter_map(pick).collect();
                Node::Dir {
                    entries: kept.clone(),
                    durable: kept,
                    parent: *parent,
                    mode: *mode,
                }
            }
        };
        Self::of(disk.nodes.iter().enumerate().map(after).collect())
    }

    /// Every file as (path, bytes): for assertions.
    pub fn files(&self) -> BTreeMap<String, Vec<u8>> {
        fn walk(nodes: &[Node], at: usize, prefix: &str, out: &mut BTreeMap<String, Vec<u8>>) {
            if let Node::Dir { entries, .. } = &nodes[at] {
                for (name, ino) in entries {
                    match &nodes[*ino] {
                        Node::File { data, .. } => {
                            out.insert(format!("{prefix}{name}"), data.clone());
                        }
                        Node::Dir { .. } => walk(nodes, *ino, &format!("{prefix}{name}/"), out),
                    }
                }
            }
        }
        let mut out = BTreeMap::new();
        walk(&self.disk().nodes, 0, "", &mut out);
        out
    }

    /// The mode of an entry: for assertions.
    pub fn mode(&self, path: &str) -> Io<u32> {
        let disk = self.disk();
        let ino = disk.find(0, path)?;
        Ok(match &disk.nodes[ino] {
            Node::File { mode, .. } | Node::Dir { mode, .. } => *mode,
        })
    }

    fn disk(&self) -> MutexGuard<'_, Disk> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a changing operation: counts it, runs the hook, and fails where it was told to.
    fn change(&self) -> Result<MutexGuard<'_, Disk>, (Errno, MutexGuard<'_, Disk>)> {
        let mut disk = self.disk();
        let n = disk.operations;
        disk.operations += 1;
        if disk.hook.as_ref().is_some_and(|(at, _)| *at == n) {
            let hook = disk.hook.take();
            drop(disk);
            if let Some((_, hook)) = hook {
                hook(self);
            }
            disk = self.disk();
        }
        if disk.stop.is_some_and(|stop| n >= stop) {
            return Err((Errno::IO, disk));
        }
        match disk.fault {
            Some((at, errno)) if at == n => Err((errno, disk)),
            _ => Ok(disk),
        }
    }

    fn changing(&self) -> Io<MutexGuard<'_, Disk>> {
        self.change().map_err(|(errno, _)| errno)
    }

    /// Enters an operation that only looks.
    fn looking(&self) -> Io<MutexGuard<'_, Disk>> {
        let disk = self.disk();
        match disk.stop {
            Some(stop) if disk.operations > stop => Err(Errno::IO),
            _ => Ok(disk),
        }
    }
}

impl Disk {
    /// Whether the sync just counted is the one to leave out.
    fn ignores(&mut self) -> bool {
        let now = self.ignore.is_some_and(|n| n + 1 == self.operations);
        self.ignored |= now;
        now
    }

    fn entries(&mut self, ino: usize) -> Io<&mut Entries> {
        if self.removed(ino) {
            return Err(Errno::NOENT);
        }
        match &mut self.nodes[ino] {
            Node::Dir { entries, .. } => Ok(entries),
            Node::File { .. } => Err(Errno::NOTDIR),
        }
    }

    fn removed(&self, ino: usize) -> bool {
        match &self.nodes[ino] {
            Node::Dir {
                parent: Some(parent),
                ..
            } => match &self.nodes[*parent] {
                Node::Dir { entries, .. } => !entries.values().any(|child| *child == ino),
                Node::File { .. } => true,
            },
            _ => false,
        }
    }

    fn find(&self, at: usize, path: &str) -> Io<usize> {
        let mut at = at;
        for part in path.split('/').filter(|part| !part.is_empty()) {
            let Node::Dir { entries, .. } = &self.nodes[at] else {
                return Err(Errno::NOTDIR);
            };
            at = *entries.get(part).ok_or(Errno::NOENT)?;
        }
        Ok(at)
    }

    fn add(&mut self, at: usize, name: &str, node: Node) -> Io<usize> {
        let ino = self.nodes.len();
        let entries = self.entries(at)?;
        if entries.contains_key(name) {
            return Err(Errno::EXIST);
        }
        entries.insert(name.into(), ino);
        self.nodes.push(node);
        Ok(ino)
    }

    fn stat(&self, ino: usize) -> Stat {
        let (kind, size) = match &self.nodes[ino] {
            Node::File { data, .. } => (FileKind::File, data.len() as u64),
            Node::Dir { .. } => (FileKind::Dir, 0),
        };
        let links = self.nodes.iter().map(|node| match node {
            Node::Dir { entries, .. } => entries.values().filter(|child| **child == ino).count(),
            Node::File { .. } => 0,
        });
        let nlink = links.sum::<usize>() as u64;
        Stat {
            kind,
            size,
            dev: 1,
            ino: ino as u64,
            nlink,
            mtime_ns: 0,
        }
    }
}

impl Fs for SimFs {
    type Dir = Handle;
    type File = Handle;
    type Lock = SimLock;

    fn open_dir(&self, at: &Handle, path: &str) -> Io<Handle> {
        let mut disk = self.looking()?;
        let ino = disk.find(at.0, path)?;
        disk.entries(ino)?;
        Ok(Handle(ino))
    }

    fn make_dir(&self, at: &Handle, name: &str, mode: u32) -> Io<()> {
        self.changing()?
            .add(at.0, name, Node::dir(Some(at.0), mode))
            .map(drop)
    }

    fn remove_dir(&self, at: &Handle, name: &str) -> Io<()> {
        let mut disk = self.changing()?;
        let ino = disk.find(at.0, name)?;
        if !disk.entries(ino)?.is_empty() {
            return Err(Errno::NOTEMPTY);
        }
        disk.entries(at.0)?.remove(name);
        Ok(())
    }

    fn open(&self, at: &Handle, path: &str) -> Io<Handle> {
        let disk = self.looking()?;
        let ino = disk.find(at.0, path)?;
        match disk.nodes[ino] {
            Node::File { .. } => Ok(Handle(ino)),
            Node::Dir { .. } => Err(Errno::ISDIR),
        }
    }

    fn create(&self, at: &Handle, name: &str, mode: u32) -> Io<Handle> {
        let node = Node::File {
            data: Vec::new(),
            durable: None,
            poisoned: false,
            mode,
        };
        self.changing()?.add(at.0, name, node).map(Handle)
    }

    fn set_mode(&self, at: &Handle, name: &str, new: u32) -> Io<()> {
        let mut disk = self.changing()?;
        let ino = disk.find(at.0, name)?;
        match &mut disk.nodes[ino] {
            Node::File { mode, .. } | Node::Dir { mode, .. } => *mode = new,
        }
        Ok(())
    }

    fn read_at(&self, file: &Handle, buf: &mut [u8], offset: u64) -> Io<usize> {
        let disk = self.looking()?;
        let Node::File { data, .. } = &disk.nodes[file.0] else {
            return Err(Errno::ISDIR);
        };
        let start = usize::try_from(offset).map_or(data.len(), |at| at.min(data.len()));
        let n = buf.len().min(data.len() - start);
        buf[..n].copy_from_slice(&data[start..start + n]);
        Ok(n)
    }

    fn write_at(&self, file: &Handle, buf: &[u8], offset: u64) -> Io<usize> {
        let mut disk = self.changing()?;
        let Node::File { data, .. } = &mut disk.nodes[file.0] else {
            return Err(Errno::ISDIR);
        };
        let start = usize::try_from(offset).map_err(|_| Errno::FBIG)?;
        let end = start.checked_add(buf.len()).ok_or(Errno::FBIG)?;
        if data.len() < end {
            data.resize(end, 0);
        }
        data[start..end].copy_from_slice(buf);
        Ok(buf.len())
    }

    fn sync_file(&self, file: &Handle) -> Io<()> {
        let (result, mut disk) = match self.change() {
            Ok(disk) => (Ok(()), disk),
            Err((errno, disk)) => (Err(errno), disk),
        };
        if disk.ignores() {
            return result;
        }
        let dead = disk.stop.is_some_and(|stop| disk.operations > stop);
        let mut again = false;
        if let Node::File {
            data,
            durable,
            poisoned,
            ..
        } = &mut disk.nodes[file.0]
        {
            again = *poisoned && !dead;
            match result {
                // As the kernel does: after one failure the next sync succeeds and writes nothing.
                Ok(()) if *poisoned => {}
                Ok(()) => *durable = Some(data.clone()),
                Err(_) => *poisoned = true,
            }
        }
        disk.synced_again |= again;
        result
    }

    fn sync_dir(&self, dir: &Handle) -> Io<()> {
        let mut disk = self.changing()?;
        if disk.ignores() {
            return Ok(());
        }
        if let Node::Dir {
            entries, durable, ..
        } = &mut disk.nodes[dir.0]
        {
            durable.clone_from(entries);
        }
        Ok(())
    }

    fn stat(&self, at: &Handle, path: &str) -> Io<Stat> {
        let disk = self.looking()?;
        Ok(disk.stat(disk.find(at.0, path)?))
    }

    fn stat_file(&self, file: &Handle) -> Io<Stat> {
        Ok(self.looking()?.stat(file.0))
    }

    fn stat_dir(&self, dir: &Handle) -> Io<Stat> {
        Ok(self.looking()?.stat(dir.0))
    }

    fn link(&self, from: &Handle, name: &str, to: &Handle, new_name: &str) -> Io<()> {
        let mut disk = self.changing()?;
        let ino = disk.find(from.0, name)?;
        if disk.cannot_link {
            return Err(Errno::PERM);
        }
        let entries = disk.entries(to.0)?;
        if entries.contains_key(new_name) {
            return Err(Errno::EXIST);
        }
        entries.insert(new_name.into(), ino);
        Ok(())
    }

    fn rename(&self, from: &Handle, name: &str, to: &Handle, new_name: &str) -> Io<()> {
        let mut disk = self.changing()?;
        let ino = disk.find(from.0, name)?;
        disk.entries(from.0)?;
        if let Ok(there) = disk.find(to.0, new_name) {
            match (&disk.nodes[ino], &disk.nodes[there]) {
                (Node::Dir { .. }, Node::Dir { entries, .. }) if entries.is_empty() => {}
                (Node::Dir { .. }, Node::Dir { .. }) => return Err(Errno::NOTEMPTY),
                (Node::File { .. }, Node::File { .. }) => {}
                (Node::Dir { .. }, Node::File { .. }) => return Err(Errno::NOTDIR),
                (Node::File { .. }, Node::Dir { .. }) => return Err(Errno::ISDIR),
            }
        }
        disk.entries(to.0)?.insert(new_name.into(), ino);
        disk.entries(from.0)?.remove(name);
        if let Node::Dir { parent, .. } = &mut disk.nodes[ino] {
            *parent = Some(to.0);
        }
        Ok(())
    }

    fn unlink(&self, at: &Handle, name: &str) -> Io<()> {
        let mut disk = self.changing()?;
        let ino = disk.find(at.0, split_path(name).1)?;
        if matches!(disk.nodes[ino], Node::Dir { .. }) {
            return Err(Errno::ISDIR);
        }
        disk.entries(at.0)?.remove(name);
        Ok(())
    }

    fn lock(&self, at: &Handle, name: &str) -> Io<SimLock> {
        let mut disk = self.changing()?;
        let found = disk.find(at.0, name);
        let new = || Node::File {
            data: Vec::new(),
            durable: None,
            poisoned: false,
            mode: 0o666,
        };
        let ino = found.or_else(|_| disk.add(at.0, name, new()))?;
        let taken = !disk.locks.insert(ino);
        drop(disk);
        if taken {
            Err(Errno::AGAIN)
        } else {
            Ok(SimLock {
                fs: self.clone(),
                ino,
            })
        }
    }

    fn list(
        &self,
        dir: &Handle,
        each: &mut dyn FnMut(&str, FileKind) -> ControlFlow<()>,
    ) -> Io<()> {
        let names: Vec<_> = {
            let mut disk = self.looking()?;
            let entries = disk.entries(dir.0)?.clone();
            entries
                .into_iter()
                .map(|(name, ino)| (name, disk.stat(ino).kind))
                .collect()
        };
        for (name, kind) in names {
            if each(&name, kind).is_break() {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const MODELS: [PowerCut; 3] = [PowerCut::Lost, PowerCut::Kept, PowerCut::Mixed(1)];

    fn write_and_rename(sync_file: bool, sync_dir: bool) -> SimFs {
        let fs = SimFs::new();
        let root = fs.root();
        let file = fs.create(&root, "t", 0o666).unwrap();
        fs.write_at(&file, b"data", 0).unwrap();
        if sync_file {
            fs.sync_file(&file).unwrap();
        }
        fs.rename(&root, "t", &root, "f").unwrap();
        if sync_dir {
            fs.sync_dir(&root).unwrap();
        }
        fs
    }

    #[test]
    fn a_missing_sync_is_seen() {
        // Ablation: what the simulated disk must catch, as real ext4 and xfs were seen to do.
        let lost = write_and_rename(false, true);
        for model in [PowerCut::Lost, PowerCut::Kept] {
            assert_eq!(
                lost.power_cut(model).files()["f"],
                b"",
                "renamed without a sync: empty"
            );
        }
        let unnamed = write_and_rename(true, false).power_cut(PowerCut::Lost);
        assert!(
            unnamed.files().is_empty(),
            "entries without a directory sync are lost"
        );
        for model in MODELS {
            assert_eq!(
                write_and_rename(true, true).power_cut(model).files()["f"],
                b"data"
            );
        }
        assert_eq!(
            lost.kill().files()["f"],
            b"data",
            "a killed process loses nothing written"
        );
    }

    #[test]
    fn linking_and_unlinking_can_lose_both() {
        // The btrfs case: the source's directory is synced before the pin's.
        let fs = write_and_rename(true, true);
        let root = fs.root();
        fs.make_dir(&root, "pins", 0o777).unwrap();
        let pins = fs.open_dir(&root, "pins").unwrap();
        fs.link(&root, "f", &pins, "f").unwrap();
        fs.unlink(&root, "f").unwrap();
        fs.sync_dir(&root).unwrap();
        assert!(fs.power_cut(PowerCut::Lost).files().is_empty());
        fs.sync_dir(&pins).unwrap();
        assert_eq!(fs.power_cut(PowerCut::Lost).files()["pins/f"], b"data");
    }

    #[test]
    fn faults_stops_and_repeated_syncs() {
        // Promise: a fault hits one operation, a stop hits all later ones, a second sync is noticed.
        let fs = SimFs::new();
        let root = fs.root();
        fs.fail_at(2, Errno::NOSPC);
        let file = fs.create(&root, "f", 0o666).unwrap();
        fs.write_at(&file, b"x", 0).unwrap();
        assert_eq!(fs.sync_file(&file), Err(Errno::NOSPC));
        assert!(!fs.synced_again());
        fs.sync_file(&file).unwrap();
        assert!(fs.synced_again());
        assert_eq!(
            fs.power_cut(PowerCut::Kept).files()["f"],
            b"",
            "the bytes are lost all the same"
        );
        fs.stop_at(fs.operations());
        assert_eq!(fs.unlink(&root, "f"), Err(Errno::IO));
        assert_eq!(fs.stat(&root, "f").unwrap_err(), Errno::IO);
        assert_eq!(fs.kill().files().len(), 1);
    }
}
