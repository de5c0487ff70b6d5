//! Writer: a payload file that grows, one append after the other, until closing publishes it.
//!
//! ```text
//! append   .tmp-...  [ header area | x.0 | y.0 | filler | x.1 ...   behind what is there
//! close    the header at byte 0, one rename -> v<k>/<unique>.safetensors
//! ```
//!
//! An append for which the header has no room publishes the file and goes on in the next. Killed at
//! any moment, a final name is absent or complete. Nothing is synced: as for publishes that are not
//! durable, a power cut may leave an empty or torn file, which its header betrays.

use std::collections::HashMap;

use rustix::io::Errno;

use crate::format::{Placement, Stream, TensorSpec, segment_checksum};
use crate::fs::{Fs, whole};
use crate::names::{Maker, unique};
use crate::publish::{TensorToWrite, VersionDir};
use crate::store::Store;
use crate::{Error, Result};

const APPEND: &str = "append";

/// Rows that were appended. They can be read once their file is published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Appended {
    /// The final name of the file, relative to the store.
    pub file: String,
    /// Where the rows start, from byte 0 of the file.
    pub offset: u64,
    /// How many rows of the field were appended before.
    pub pos: u64,
    /// The segment checksum.
    pub checksum: String,
}

/// A file before it has its name.
struct Draft<F: Fs> {
    file: F::File,
    temporary: String,
    name: String,
    stream: Stream,
}

/// Why a writer takes nothing more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Over {
    Closed,
    Discarded,
    Failed,
}

/// How far a field is.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    appends: u64,
    rows: u64,
}

/// What the tensors of an append are called and where they belong.
#[derive(Default)]
struct Named {
    specs: Vec<TensorSpec>,
    pos: Vec<u64>,
    /// How far their fields are with them.
    fields: HashMap<String, Progress>,
}

/// Writes payload files of one policy version, append by append.
pub struct Writer<F: Fs> {
    fs: F,
    root: F::Dir,
    to: VersionDir<F>,
    version: u64,
    group: bool,
    fields: HashMap<String, Progress>,
    draft: Option<Draft<F>>,
    over: Option<Over>,
    /// A forked child drops its copy without removing what its parent still writes.
    pid: u32,
}

impl<F: Fs> Store<F> {
    /// A writer of payload files in `v<version>`. It outlives the store's handle.
    pub fn writer(&self, version: u64) -> Result<Writer<F>> {
        let to = VersionDir::open(&self.fs, &self.dir, version, self.group)?;
        let root = self.fs.open_dir(&self.dir, "");
        Ok(Writer {
            fs: self.fs.clone(),
            root: root.map_err(|errno| Error::os("open store", self.root(), errno))?,
            to,
            version,
            group: self.group,
            fields: HashMap::new(),
            draft: None,
            over: None,
            pid: std::process::id(),
        })
    }
}

impl<F: Fs> Writer<F> {
    /// Appends each tensor as `<field>.<n>`, all to one file; one answer per tensor.
    ///
    /// The caller's mistakes change nothing. After any other error the file is gone, the segments in
    /// it are void and the writer takes nothing more; files that were full before stay.
    pub fn append(&mut self, tensors: &[TensorToWrite<'_>]) -> Result<Vec<Appended>> {
        self.usable()?;
        let named = self.name(tensors)?;
        let fresh = || Stream::new(self.version);
        let mut stream = self
            .draft
            .as_ref()
            .map_or_else(fresh, |draft| draft.stream.clone());
        let mut placement = stream.place(&named.specs)?;
        let full = !stream.make_room(&placement);
        if full {
            stream = fresh();
            placement = stream.place(&named.specs)?;
            if !stream.make_room(&placement) {
                let why = "the header would have more than 100,000,000 bytes";
                return Err(Error::invalid(APPEND, "", why));
            }
        }
        for (index, tensor) in tensors.iter().enumerate() {
            tensor.check(APPEND, placement.len(index))?;
        }
        let done = self.write(tensors, &named, stream, &placement, full);
        if done.is_err() {
            self.give_up(Over::Failed);
        } else {
            self.fields.extend(named.fields);
        }
        done
    }

    /// Publishes what was appended; nothing if nothing was. Idempotent.
    pub fn close(&mut self) -> Result<()> {
        if !matches!(self.over, Some(Over::Closed | Over::Discarded)) {
            self.usable()?;
            let draft = self.draft.take();
            let done = draft.map_or(Ok(()), |draft| self.publish(&draft));
            let over = done.as_ref().map_or(Over::Failed, |()| Over::Closed);
            self.over = Some(over);
            return done;
        }
        Ok(())
    }

    /// Removes what was not published; does nothing once the writer is closed. Idempotent.
    pub fn discard(&mut self) {
        if self.pid == std::process::id() && self.over.is_none() {
            self.give_up(Over::Discarded);
        }
    }

    fn usable(&self) -> Result<()> {
        let why = match self.over {
            None if self.pid == std::process::id() => return Ok(()),
            None => "it belongs to the process that opened it, open one in this process",
            Some(Over::Closed) => "it is closed",
            Some(Over::Discarded) => "it was discarded",
            Some(Over::Failed) => {
                "it failed before: the file is gone and the segments in it are void, open a new one"
            }
        };
        Err(Error::invalid("writer", self.to.path(""), why))
    }

    /// The names and positions that tensors of these fields get.
    fn name(&self, tensors: &[TensorToWrite<'_>]) -> Result<Named> {
        let mut named = Named::default();
        for tensor in tensors {
            let wrong = |why| Error::invalid(APPEND, tensor.name, why);
            if tensor.name.is_empty() {
                return Err(wrong("a field needs a name"));
            }
            let before = named.fields.get(tensor.name);
            let mut progress = before
                .or_else(|| self.fields.get(tensor.name))
                .copied()
                .unwrap_or_default();
            named.specs.push(TensorSpec {
                name: format!("{}.{}", tensor.name, progress.appends),
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
            });
            named.pos.push(progress.rows);
            let rows = tensor.shape.first().copied().unwrap_or(1);
            let rows = progress.rows.checked_add(rows);
            progress.rows = rows
                .filter(|rows| i64::try_from(*rows).is_ok())
                .ok_or_else(|| wrong("its rows end beyond 2**63 - 1"))?;
            progress.appends += 1;
            named.fields.insert(tensor.name.into(), progress);
        }
        Ok(named)
    }

    fn write(
        &mut self,
        tensors: &[TensorToWrite<'_>],
        named: &Named,
        mut stream: Stream,
        placement: &Placement,
        full: bool,
    ) -> Result<Vec<Appended>> {
        if tensors.is_empty() {
            return Ok(Vec::new());
        }
        if full && let Some(draft) = self.draft.take() {
            self.publish(&draft)?;
        }
        let mut draft = match self.draft.take() {
            Some(draft) => draft,
            None => self.create()?,
        };
        let mut appended = Vec::with_capacity(tensors.len());
        let mut lists = Vec::with_capacity(tensors.len());
        for (index, tensor) in tensors.iter().enumerate() {
            let offset = stream.offset(placement, index);
            let list = tensor.hashed(|from, piece| {
                whole::write_all(&self.fs, &draft.file, piece, offset + from)
            });
            let list = match list {
                Ok(list) => list,
                Err(errno) => {
                    let error = self.error(APPEND, &draft.name, errno);
                    self.draft = Some(draft);
                    return Err(error);
                }
            };
            appended.push(Appended {
                file: self.to.path(&draft.name),
                offset,
                pos: named.pos[index],
                checksum: segment_checksum(&list),
            });
            lists.push(list);
        }
        stream.add(placement, &named.specs, &lists);
        draft.stream = stream;
        self.draft = Some(draft);
        Ok(appended)
    }

    fn create(&self) -> Result<Draft<F>> {
        let (temporary, name) = (
            Maker::current().temporary(),
            format!("{}.safetensors", unique()),
        );
        let file = whole::create(&self.fs, &self.to.dir, &temporary, self.group);
        Ok(Draft {
            file: file.map_err(|errno| self.error(APPEND, &name, errno))?,
            temporary,
            name,
            stream: Stream::new(self.version),
        })
    }

    /// Writes the header and gives the file its name; on errors nothing of it is left.
    fn publish(&self, draft: &Draft<F>) -> Result<()> {
        let (fs, dir) = (&self.fs, &self.to.dir);
        whole::write_all(fs, &draft.file, &draft.stream.header(), 0)
            .and_then(|()| fs.rename(dir, &draft.temporary, dir, &draft.name))
            .map_err(|errno| {
                self.remove(draft);
                self.error("publish", &draft.name, errno)
            })?;
        self.to.confirm(fs, &self.root, &draft.name)
    }

    fn give_up(&mut self, why: Over) {
        if let Some(draft) = self.draft.take() {
            self.remove(&draft);
        }
        self.over = Some(why);
    }

    /// Removes a temporary; what cannot be removed is swept once its maker is gone.
    fn remove(&self, draft: &Draft<F>) {
        let _ = self.fs.unlink(&self.to.dir, &draft.temporary);
    }

    fn error(&self, op: &'static str, name: &str, errno: Errno) -> Error {
        self.to.error((&self.fs, &self.root), op, name, errno)
    }
}

impl<F: Fs> Drop for Writer<F> {
    fn drop(&mut self) {
        self.discard();
    }
}

#[cfg(test)]
mod tests;
