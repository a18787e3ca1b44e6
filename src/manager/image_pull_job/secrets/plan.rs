//! Which copies of pull secrets to make, change and remove.
//!
//! A copy has the type and data of its source and nothing else of it, names its source in an annotation,
//! and lists the jobs that need it in another; it goes with the last of them.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::api::keys;
use crate::cluster::Key;

/// What is known of a Secret in the daemons' namespace: never its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyView {
    /// Its name.
    pub name: String,
    /// What a conditional write must name.
    pub resource_version: String,
    /// `namespace/name` of its source.
    pub source: String,
    /// `namespace/name` of the jobs that need it.
    pub references: BTreeSet<String>,
    /// Its type.
    pub type_: Option<String>,
    /// A hash of its data.
    pub digest: u64,
}

impl CopyView {
    /// Reduces a Secret; `None` when it is no copy.
    #[must_use]
    pub fn read(secret: &Secret) -> Option<Self> {
        let notes = secret.metadata.annotations.as_ref()?;
        let references = notes.get(keys::SECRET_REFERENCES).map_or("", String::as_str);
        Some(Self {
            name: secret.metadata.name.clone()?,
            resource_version: secret.metadata.resource_version.clone().unwrap_or_default(),
            source: notes.get(keys::SECRET_SOURCE_KEY)?.clone(),
            references: references
                .split(',')
                .filter(|r| !r.is_empty())
                .map(str::to_owned)
                .collect(),
            type_: secret.type_.clone(),
            digest: digest(secret.data.as_ref()),
        })
    }
}

/// What to do about one copy.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// It is there as it should be.
    Nothing,
    /// Make it.
    Create(Box<Secret>),
    /// Write it as it should be.
    Replace(Box<Secret>),
    /// Remove it.
    Delete,
}

/// One copy: its name, and what to do about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Name of the copy; also of one that cannot be made, so that the daemon says that it is missing.
    pub copy: String,
    /// What to do.
    pub step: Step,
}

/// What a job needs of one source. `found` is the source, if it exists; `copies` are all that there are.
#[must_use]
pub fn wanted(source: &Key, found: Option<&Secret>, copies: &[&CopyView], job: &str, into: &str) -> Plan {
    let key = source.to_string();
    let mine = copies.iter().filter(|c| c.source == key);
    let copy = mine
        .max_by_key(|c| (c.references.contains(job), std::cmp::Reverse(c.name.as_str())))
        .copied();
    let name = copy.map_or_else(|| free_name(source, copies), |c| c.name.clone());
    let step = match (found, copy) {
        (None, None) => Step::Nothing,
        (None, Some(_)) => Step::Delete,
        (Some(found), None) => Step::Create(Box::new(secret(
            &name,
            into,
            &key,
            found,
            [job.to_owned()].into(),
        ))),
        // The type of a Secret cannot be changed; it is made anew when it is gone.
        (Some(found), Some(copy)) if copy.type_ != found.type_ => Step::Delete,
        (Some(found), Some(copy)) => {
            let mut references = copy.references.clone();
            let new = references.insert(job.to_owned());
            if !new && copy.digest == digest(found.data.as_ref()) {
                Step::Nothing
            } else {
                let mut secret = secret(&name, into, &key, found, references);
                secret.metadata.resource_version = Some(copy.resource_version.clone());
                Step::Replace(Box::new(secret))
            }
        }
    };
    Plan { copy: name, step }
}

/// The references that a copy keeps when a job no longer needs it; `None` when nobody else does.
#[must_use]
pub fn without(copy: &CopyView, job: &str) -> Option<String> {
    let mut rest = copy.references.clone();
    rest.remove(job);
    (!rest.is_empty()).then(|| join(&rest))
}

fn join(references: &BTreeSet<String>) -> String {
    references
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join(",")
}

fn secret(name: &str, into: &str, key: &str, source: &Secret, references: BTreeSet<String>) -> Secret {
    let annotations: BTreeMap<String, String> = [
        (keys::SECRET_SOURCE_KEY.to_owned(), key.to_owned()),
        (keys::SECRET_REFERENCES.to_owned(), join(&references)),
        (keys::SECRET_MODE.to_owned(), keys::MODE_BATCH.to_owned()),
    ]
    .into();
    Secret {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(into.to_owned()),
            annotations: Some(annotations),
            ..ObjectMeta::default()
        },
        type_: source.type_.clone(),
        data: source.data.clone(),
        ..Secret::default()
    }
}

/// `<source>-<6 hex>`, the same for the same source, so that two attempts make one copy.
fn free_name(source: &Key, copies: &[&CopyView]) -> String {
    /// A name may have 253 characters; a hyphen and six digits are ours.
    const KEPT: usize = 246;
    let start: String = source.name.chars().take(KEPT).collect();
    let key = source.to_string();
    let taken = |name: &str| copies.iter().any(|c| c.name == name);
    let mut names = (0_u32..).map(|round| {
        let hash = key
            .bytes()
            .chain(round.to_le_bytes())
            .fold(0x811c_9dc5_u32, |h, b| {
                (h ^ u32::from(b)).wrapping_mul(0x0100_0193)
            });
        format!("{start}-{:06x}", hash & 0x00ff_ffff)
    });
    names.find(|name| !taken(name)).unwrap_or(start)
}

fn digest(data: Option<&BTreeMap<String, ByteString>>) -> u64 {
    let mut hasher = DefaultHasher::new();
    for (key, value) in data.into_iter().flatten() {
        key.hash(&mut hasher);
        value.0.hash(&mut hasher);
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;
    use proptest::prelude::*;

    fn source(value: &str, type_: &str) -> Secret {
        Secret {
            metadata: ObjectMeta {
                annotations: Some(
                    [(
                        "kubectl.kubernetes.io/last-applied-configuration".into(),
                        "{…}".into(),
                    )]
                    .into(),
                ),
                labels: Some([("a".into(), "b".into())].into()),
                ..ObjectMeta::default()
            },
            type_: Some(type_.to_owned()),
            data: Some([("k".to_owned(), ByteString(value.into()))].into()),
            ..Secret::default()
        }
    }

    #[test]
    fn a_copy_has_type_and_data_and_nothing_else_of_its_source() {
        let plan = wanted(
            &Key::namespaced("a", "s"),
            Some(&source("1", "t")),
            &[],
            "a/j",
            "kdc",
        );
        let Step::Create(copy) = plan.step else {
            panic!("{:?}", plan.step)
        };
        assert_eq!(copy.metadata.labels, None);
        let notes = copy.metadata.annotations.clone().unwrap();
        assert!(notes.keys().all(|k| k.starts_with("imagepulljobs.kruise.io/")));
        assert_eq!(
            (copy.type_.as_deref(), copy.data),
            (Some("t"), source("1", "t").data)
        );
    }

    /// What the API server holds.
    #[derive(Default)]
    struct World {
        copies: BTreeMap<String, Secret>,
    }

    impl World {
        fn views(&self) -> Vec<CopyView> {
            self.copies.values().filter_map(CopyView::read).collect()
        }
        fn act(&mut self, plan: &Plan) {
            match &plan.step {
                Step::Nothing => {}
                Step::Create(s) | Step::Replace(s) => {
                    self.copies.insert(plan.copy.clone(), (**s).clone());
                }
                Step::Delete => {
                    self.copies.remove(&plan.copy);
                }
            }
        }
        fn want(&mut self, key: &Key, found: Option<&Secret>, job: &str) -> String {
            for _ in 0..5 {
                let views = self.views();
                let plan = wanted(key, found, &views.iter().collect::<Vec<_>>(), job, "kdc");
                if plan.step == Step::Nothing {
                    return plan.copy;
                }
                self.act(&plan);
            }
            panic!("no end");
        }
        fn release(&mut self, job: &str) {
            for view in self.views() {
                if !view.references.contains(job) {
                    continue;
                }
                match without(&view, job) {
                    None => {
                        self.copies.remove(&view.name);
                    }
                    Some(rest) => {
                        let notes = self
                            .copies
                            .get_mut(&view.name)
                            .unwrap()
                            .metadata
                            .annotations
                            .as_mut()
                            .unwrap();
                        notes.insert(keys::SECRET_REFERENCES.to_owned(), rest);
                    }
                }
            }
        }
    }

    proptest! {
        /// Whatever jobs come and go and sources change: after a job has asked, its copy is its source, there is
        /// one copy a source, and with the last job nothing is left.
        #[test]
        fn copies_follow_and_go(ops in prop::collection::vec((0_u8..3, 0_u8..3, 0_u8..4, any::<bool>()), 1..40)) {
            let mut world = World::default();
            for (job, src, value, leave) in ops {
                let job = format!("a/j{job}");
                if leave { world.release(&job); continue; }
                let key = Key::namespaced(["a", "b", "a"][usize::from(src)], ["s", "s", "t"][usize::from(src)]);
                let found = (value < 3).then(|| source(&value.to_string(), ["t", "t", "u"][usize::from(value)]));
                let name = world.want(&key, found.as_ref(), &job);
                let copy = world.copies.get(&name);
                prop_assert_eq!(copy.and_then(|c| c.data.clone()), found.as_ref().and_then(|s| s.data.clone()));
                let views = world.views();
                let sources: BTreeSet<_> = views.iter().map(|v| v.source.clone()).collect();
                prop_assert_eq!(sources.len(), views.len());
            }
            for job in 0..3 { world.release(&format!("a/j{job}")); }
            prop_assert!(world.copies.is_empty());
        }
    }
}
