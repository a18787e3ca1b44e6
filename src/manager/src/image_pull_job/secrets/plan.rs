//! Which copies of pull secrets to make, change and remove.
//!
//! A copy has the credentials of its source and nothing else of it, names its source in an annotation, and lists the
//! jobs that need it in another. Some seconds after the last of them has gone it is deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use kruise_api::keys;
use kruise_cluster::Key;

/// How long a copy stays after the last job that needs it, so that a series of jobs does not make and delete it each
/// time.
pub const UNUSED_COPY_TTL: Duration = Duration::from_secs(5);

/// The types of Secrets that hold registry credentials, each with the one key that holds them.
const CREDENTIALS: [(&str, &str); 2] = [
    ("kubernetes.io/dockerconfigjson", ".dockerconfigjson"),
    ("kubernetes.io/dockercfg", ".dockercfg"),
];

/// What is copied of a source.
type SecretData = BTreeMap<String, ByteString>;

/// The type and the credentials of a Secret that holds any. Whatever else a Secret holds stays where it is: who may name
/// it in a job need not be allowed to read it.
fn credentials(secret: &Secret) -> Option<(&'static str, SecretData)> {
    let type_ = secret.type_.as_deref()?;
    let (type_, key) = CREDENTIALS.into_iter().find(|(name, _)| *name == type_)?;
    let value = secret.data.as_ref()?.get(key)?;
    Some((type_, [(key.to_owned(), value.clone())].into()))
}

/// What is known of a Secret in the daemons' namespace: never its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyView {
    /// Its name.
    pub name: String,
    /// Identity of the object.
    pub uid: String,
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
    pub fn from_secret(secret: &Secret) -> Option<Self> {
        let annotations = secret.metadata.annotations.as_ref()?;
        let references = annotations
            .get(keys::SECRET_REFERENCES)
            .map_or("", String::as_str);
        Some(Self {
            name: secret.metadata.name.clone()?,
            uid: secret.metadata.uid.clone().unwrap_or_default(),
            resource_version: secret.metadata.resource_version.clone().unwrap_or_default(),
            source: annotations.get(keys::SECRET_SOURCE_KEY)?.clone(),
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
pub enum CopyStep {
    /// It is there as it should be.
    Nothing,
    /// Make it.
    Create(Box<Secret>),
    /// Write it as it should be.
    Replace(Box<Secret>),
    /// Remove the one with that UID.
    Delete(String),
}

/// What there is to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceKind {
    /// Credentials.
    Credentials,
    /// A Secret that holds none.
    NoCredentials,
    /// No Secret.
    Missing,
}

/// One copy: its name, and what to do about it.
#[derive(Clone, Debug, PartialEq)]
pub struct CopyPlan {
    /// Name of the copy; also of one that cannot be made, so that the daemon says that it is missing.
    pub copy: String,
    /// What to do.
    pub step: CopyStep,
    /// What its source is.
    pub source: SourceKind,
}

/// What a job needs of one source. `found` is the source, if it exists; `copies` are all that there are.
#[must_use]
pub fn plan_copy(
    source: &Key,
    source_secret: Option<&Secret>,
    copies: &[&CopyView],
    job: &str,
    copy_namespace: &str,
) -> CopyPlan {
    let key = source.to_string();
    let same_source = copies.iter().filter(|c| c.source == key);
    let copy = same_source
        .max_by_key(|c| (c.references.contains(job), std::cmp::Reverse(c.name.as_str())))
        .copied();
    let name = copy.map_or_else(|| copy_name(source, copies), |c| c.name.clone());
    let source_credentials = source_secret.map(credentials);
    let step = match (source_credentials.clone().flatten(), copy) {
        (None, None) => CopyStep::Nothing,
        (None, Some(copy)) => CopyStep::Delete(copy.uid.clone()),
        (Some(held), None) => {
            let new = copy_secret(&name, copy_namespace, &key, held, [job.to_owned()].into());
            CopyStep::Create(Box::new(new))
        }
        // The type of a Secret cannot be changed; it is created again when it is gone.
        (Some((type_, _)), Some(copy)) if copy.type_.as_deref() != Some(type_) => {
            CopyStep::Delete(copy.uid.clone())
        }
        (Some(held), Some(copy)) => {
            let mut references = copy.references.clone();
            let new = references.insert(job.to_owned());
            if !new && copy.digest == digest(Some(&held.1)) {
                CopyStep::Nothing
            } else {
                let mut secret = copy_secret(&name, copy_namespace, &key, held, references);
                secret.metadata.uid = Some(copy.uid.clone());
                secret.metadata.resource_version = Some(copy.resource_version.clone());
                CopyStep::Replace(Box::new(secret))
            }
        }
    };
    let source = match source_credentials {
        Some(Some(_)) => SourceKind::Credentials,
        Some(None) => SourceKind::NoCredentials,
        None => SourceKind::Missing,
    };
    CopyPlan {
        copy: name,
        step,
        source,
    }
}

/// The references that a copy keeps when a job no longer needs it.
#[must_use]
pub fn references_without(copy: &CopyView, job: &str) -> String {
    let mut remaining = copy.references.clone();
    remaining.remove(job);
    join_references(&remaining)
}

/// The jobs that have to look at a copy after a change of it: all of them where it has gone or holds something else, and
/// those that it does not name any more.
#[must_use]
pub fn affected_jobs(old: Option<&CopyView>, new: Option<&CopyView>) -> BTreeSet<String> {
    let (Some(old), Some(new)) = (old, new) else {
        return old
            .or(new)
            .map(|copy| copy.references.clone())
            .unwrap_or_default();
    };
    let content = |copy: &CopyView| {
        (
            copy.uid.clone(),
            copy.source.clone(),
            copy.type_.clone(),
            copy.digest,
        )
    };
    if content(old) == content(new) {
        old.references.difference(&new.references).cloned().collect()
    } else {
        old.references.union(&new.references).cloned().collect()
    }
}

fn join_references(references: &BTreeSet<String>) -> String {
    references
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join(",")
}

fn copy_secret(
    name: &str,
    copy_namespace: &str,
    key: &str,
    (type_, data): (&str, SecretData),
    references: BTreeSet<String>,
) -> Secret {
    let annotations: BTreeMap<String, String> = [
        (keys::SECRET_SOURCE_KEY.to_owned(), key.to_owned()),
        (keys::SECRET_REFERENCES.to_owned(), join_references(&references)),
        (keys::SECRET_MODE.to_owned(), keys::MODE_BATCH.to_owned()),
    ]
    .into();
    Secret {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(copy_namespace.to_owned()),
            annotations: Some(annotations),
            ..ObjectMeta::default()
        },
        type_: Some(type_.to_owned()),
        data: Some(data),
        ..Secret::default()
    }
}

/// `<source>-<6 hex>`, the same for the same source, so that two attempts make one copy.
fn copy_name(source: &Key, copies: &[&CopyView]) -> String {
    /// A name may have 253 characters; a hyphen and six digits are ours.
    const MAX_SOURCE_CHARS: usize = 246;
    let start: String = source.name.chars().take(MAX_SOURCE_CHARS).collect();
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

fn digest(data: Option<&SecretData>) -> u64 {
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

    const DOCKER_CONFIG_JSON: &str = CREDENTIALS[0].0;
    const DOCKER_CFG: &str = CREDENTIALS[1].0;

    fn source(value: &str, type_: &str) -> Secret {
        let key = CREDENTIALS.into_iter().find(|(name, _)| *name == type_);
        let data = [
            (key.map_or("tls.key", |(_, key)| key), value),
            ("other", "private"),
        ];
        let data = data.map(|(key, value)| (key.to_owned(), ByteString(value.into())));
        Secret {
            metadata: ObjectMeta {
                annotations: Some([("note".into(), "{…}".into())].into()),
                labels: Some([("a".into(), "b".into())].into()),
                ..ObjectMeta::default()
            },
            type_: Some(type_.to_owned()),
            data: Some(data.into()),
            ..Secret::default()
        }
    }

    #[test]
    fn copy_holds_only_the_credentials() {
        let key = Key::namespaced("a", "s");
        let plan = plan_copy(&key, Some(&source("1", DOCKER_CONFIG_JSON)), &[], "a/j", "kdc");
        let CopyStep::Create(copy) = plan.step else {
            panic!("{:?}", plan.step)
        };
        assert_eq!(
            (plan.source, copy.metadata.labels),
            (SourceKind::Credentials, None)
        );
        let notes = copy.metadata.annotations.clone().unwrap();
        assert!(notes.keys().all(|k| k.starts_with("imagepulljobs.kruise.io/")));
        let expected = Some([(".dockerconfigjson".to_owned(), ByteString("1".into()))].into());
        assert_eq!(
            (copy.type_.as_deref(), copy.data),
            (Some(DOCKER_CONFIG_JSON), expected)
        );
    }

    #[test]
    fn secrets_of_other_types_are_not_copied() {
        let key = Key::namespaced("a", "s");
        for type_ in [
            "Opaque",
            "kubernetes.io/tls",
            "kubernetes.io/service-account-token",
        ] {
            let plan = plan_copy(&key, Some(&source("1", type_)), &[], "a/j", "kdc");
            assert_eq!(
                (plan.step, plan.source),
                (CopyStep::Nothing, SourceKind::NoCredentials),
                "{type_}"
            );
        }
        let empty = Secret {
            data: None,
            ..source("1", DOCKER_CONFIG_JSON)
        };
        assert_eq!(
            plan_copy(&key, Some(&empty), &[], "a/j", "kdc").source,
            SourceKind::NoCredentials
        );
        // One that an earlier release made of it goes.
        let old = CopyView {
            type_: Some("Opaque".to_owned()),
            ..view("a/s", &["a/j"])
        };
        let plan = plan_copy(&key, Some(&source("1", "Opaque")), &[&old], "a/j", "kdc");
        assert_eq!(plan.step, CopyStep::Delete("uid".to_owned()));
    }

    fn view(source: &str, references: &[&str]) -> CopyView {
        CopyView {
            name: "s-1".to_owned(),
            uid: "uid".to_owned(),
            resource_version: "1".to_owned(),
            source: source.to_owned(),
            references: references.iter().map(|r| (*r).to_owned()).collect(),
            type_: Some(DOCKER_CONFIG_JSON.to_owned()),
            digest: 1,
        }
    }

    #[test]
    fn adding_a_job_affects_no_other_job() {
        let (one, both) = (view("a/s", &["a/j"]), view("a/s", &["a/j", "a/k"]));
        assert!(affected_jobs(Some(&one), Some(&both)).is_empty());
        assert_eq!(affected_jobs(Some(&both), Some(&one)), ["a/k".to_owned()].into());
        let changed = CopyView {
            digest: 2,
            ..both.clone()
        };
        assert_eq!(affected_jobs(Some(&both), Some(&changed)), both.references);
        assert_eq!(affected_jobs(Some(&both), None), both.references);
        assert_eq!(affected_jobs(None, Some(&one)), one.references);
    }

    /// What the API server holds.
    #[derive(Default)]
    struct FakeCluster {
        copies: BTreeMap<String, Secret>,
    }

    impl FakeCluster {
        fn views(&self) -> Vec<CopyView> {
            self.copies.values().filter_map(CopyView::from_secret).collect()
        }
        fn apply(&mut self, plan: &CopyPlan) {
            match &plan.step {
                CopyStep::Nothing => {}
                CopyStep::Create(s) | CopyStep::Replace(s) => {
                    self.copies.insert(plan.copy.clone(), (**s).clone());
                }
                CopyStep::Delete(_) => {
                    self.copies.remove(&plan.copy);
                }
            }
        }
        fn sync_copy(&mut self, key: &Key, source_secret: Option<&Secret>, job: &str) -> String {
            for _ in 0..5 {
                let views = self.views();
                let plan = plan_copy(key, source_secret, &views.iter().collect::<Vec<_>>(), job, "kdc");
                if plan.step == CopyStep::Nothing {
                    return plan.copy;
                }
                self.apply(&plan);
            }
            panic!("no end");
        }
        fn release(&mut self, job: &str) {
            for view in self.views() {
                let copy = self.copies.get_mut(&view.name).unwrap();
                let notes = copy.metadata.annotations.as_mut().unwrap();
                notes.insert(keys::SECRET_REFERENCES.to_owned(), references_without(&view, job));
            }
        }
    }

    proptest! {
        /// Whatever jobs come and go and sources change: after a job has asked, its copy holds the credentials of its
        /// source, there is one copy a source, and with the last job no copy names any.
        #[test]
        fn copies_follow_sources_and_jobs(ops in prop::collection::vec((0_u8..3, 0_u8..3, 0_u8..5, any::<bool>()), 1..40)) {
            let mut world = FakeCluster::default();
            for (job, src, value, leave) in ops {
                let job = format!("a/j{job}");
                if leave { world.release(&job); continue; }
                let key = Key::namespaced(["a", "b", "a"][usize::from(src)], ["s", "s", "t"][usize::from(src)]);
                let types = [DOCKER_CONFIG_JSON, DOCKER_CONFIG_JSON, DOCKER_CFG, "Opaque"];
                let source_secret = types.get(usize::from(value)).map(|type_| source(&value.to_string(), type_));
                let name = world.sync_copy(&key, source_secret.as_ref(), &job);
                let copy = world.copies.get(&name);
                let expected = source_secret.as_ref().and_then(credentials).map(|(_, data)| data);
                prop_assert_eq!(copy.and_then(|c| c.data.clone()), expected);
                let views = world.views();
                let sources: BTreeSet<_> = views.iter().map(|v| v.source.clone()).collect();
                prop_assert_eq!(sources.len(), views.len());
            }
            for job in 0..3 { world.release(&format!("a/j{job}")); }
            prop_assert!(world.views().iter().all(|copy| copy.references.is_empty()));
        }
    }
}
