//! Kubelet's configuration of credential provider plugins: which plugin is asked for which images.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::Deserialize;

use crate::image_pull::plan::keyring::Pattern;
use crate::yaml;
use kruise_api::validation::labels::qualified_name_errors;
use kruise_ops::flag_values::duration;

/// Maximum bytes of the file.
pub const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Maximum number of plugins.
const MAX_PROVIDERS: usize = 100;
const CONFIG_GROUP: &str = "kubelet.config.k8s.io";
const CONFIG_KIND: &str = "CredentialProviderConfig";
const PLUGIN_GROUP: &str = "credentialprovider.kubelet.k8s.io";
/// Versions of both formats; of what is read here, only `tokenAttributes` is not in all.
const VERSIONS: [&str; 3] = ["v1", "v1beta1", "v1alpha1"];
/// The version of the configuration that has `tokenAttributes`.
const TOKEN_CONFIG_VERSION: &str = "kubelet.config.k8s.io/v1";
/// The version of requests that have a token.
const TOKEN_PLUGIN_VERSION: &str = "credentialprovider.kubelet.k8s.io/v1";

/// One plugin.
#[derive(Clone, Debug, PartialEq)]
pub struct Provider {
    /// Its name, and the name of its executable.
    pub name: String,
    /// `apiVersion` of requests and responses.
    pub api_version: String,
    /// How long credentials are kept if the plugin does not say it.
    pub default_cache: Duration,
    /// Arguments of the executable.
    pub args: Vec<String>,
    /// Variables of its environment, in addition to those of the daemon.
    pub env: Vec<(String, String)>,
    /// What it gets of a service account; nothing if `None`.
    pub service_account: Option<TokenAttributes>,
    images: Vec<Pattern>,
}

impl Provider {
    /// Whether the plugin is asked for images of this repository (`HOST/PATH`).
    pub fn serves(&self, repository: &str) -> bool {
        self.images.iter().any(|pattern| pattern.matches(repository))
    }
}

/// What a plugin gets of a service account.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenAttributes {
    /// The audience of the token.
    pub audience: String,
    /// With whom its credentials are shared.
    pub cache_type: TokenCacheType,
    /// Whether it is called only for a service account.
    pub is_required: bool,
    required_annotations: Vec<String>,
    optional_annotations: Vec<String>,
}

impl TokenAttributes {
    /// The annotations that the plugin gets. An error names one that the service account lacks: with it, workloads opt
    /// in to the plugin.
    pub fn select_annotations(
        &self,
        all: &BTreeMap<String, String>,
    ) -> Result<BTreeMap<String, String>, &str> {
        let missing = self
            .required_annotations
            .iter()
            .find(|key| !all.contains_key(*key));
        if let Some(missing) = missing {
            return Err(missing.as_str());
        }
        let keys = self.required_annotations.iter().chain(&self.optional_annotations);
        let present = keys.filter_map(|key| Some((key.clone(), all.get(key)?.clone())));
        Ok(present.collect())
    }
}

/// For whom credentials are kept that a plugin returned for the token of a service account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenCacheType {
    /// For the service account, whatever its token is.
    ServiceAccount,
    /// For the token.
    Token,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ConfigFile {
    api_version: String,
    kind: String,
    #[serde(default)]
    providers: Vec<ProviderEntry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ProviderEntry {
    name: String,
    match_images: Vec<String>,
    default_cache_duration: String,
    api_version: String,
    #[serde(default)]
    args: Option<Vec<String>>,
    #[serde(default)]
    env: Option<Vec<EnvEntry>>,
    #[serde(default)]
    token_attributes: Option<TokenEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EnvEntry {
    name: String,
    #[serde(default)]
    value: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct TokenEntry {
    #[serde(default)]
    service_account_token_audience: Option<String>,
    #[serde(default)]
    cache_type: Option<String>,
    #[serde(default)]
    require_service_account: Option<bool>,
    #[serde(default)]
    required_service_account_annotation_keys: Option<Vec<String>>,
    #[serde(default)]
    optional_service_account_annotation_keys: Option<Vec<String>>,
}

/// Parses the file.
///
/// # Errors
/// When kubelet would refuse it: unknown versions and fields, names that are paths, patterns that match no image.
pub fn parse(text: &str) -> Result<Vec<Provider>, String> {
    // The text of an error may have values of the file, and tenants read it: they see only the place.
    let mut documents = yaml::documents(text).map_err(|why| format!("it is not YAML{}", why.place()))?;
    let (Some(document), true) = (documents.pop(), documents.is_empty()) else {
        return Err(format!("it is not one {CONFIG_KIND}"));
    };
    let file: ConfigFile = serde_path_to_error::deserialize(document).map_err(|why| {
        let path = why.path();
        format!("it is not a {CONFIG_KIND}: a field at {path} is unknown, missing or of another type")
    })?;
    let is_version = |text: &str, group: &str| {
        let version = text.strip_prefix(group).and_then(|rest| rest.strip_prefix('/'));
        version.is_some_and(|version| VERSIONS.contains(&version))
    };
    if !is_version(&file.api_version, CONFIG_GROUP) || file.kind != CONFIG_KIND {
        return Err(format!(
            "it is {} {}; expected {CONFIG_GROUP}/v1 {CONFIG_KIND}",
            file.api_version, file.kind
        ));
    }
    if file.providers.is_empty() || file.providers.len() > MAX_PROVIDERS {
        let count = file.providers.len();
        return Err(format!("it has {count} providers; expected 1 to {MAX_PROVIDERS}"));
    }
    let mut providers: Vec<Provider> = Vec::new();
    for entry in file.providers {
        let name = entry.name.clone();
        if entry.token_attributes.is_some() && file.api_version != TOKEN_CONFIG_VERSION {
            return Err(format!(
                "provider {name:?}: tokenAttributes need apiVersion {TOKEN_CONFIG_VERSION}"
            ));
        }
        let provider =
            parse_provider(entry, &is_version).map_err(|why| format!("provider {name:?}: {why}"))?;
        if providers.iter().any(|other| other.name == provider.name) {
            return Err(format!("provider {name:?}: there are two of that name"));
        }
        providers.push(provider);
    }
    Ok(providers)
}

fn parse_provider(
    entry: ProviderEntry,
    is_version: &impl Fn(&str, &str) -> bool,
) -> Result<Provider, String> {
    let is_path = entry.name.contains(['/', '\\']) || [".", "..", ""].contains(&entry.name.as_str());
    if is_path || entry.name.contains(char::is_whitespace) || entry.name.contains('\0') {
        return Err("a name is that of an executable, without a path or spaces".to_owned());
    }
    if !is_version(&entry.api_version, PLUGIN_GROUP) {
        let version = &entry.api_version;
        return Err(format!("apiVersion is {version:?}; expected {PLUGIN_GROUP}/v1"));
    }
    if entry.match_images.is_empty() {
        return Err("matchImages is empty".to_owned());
    }
    let pattern = |text: &String| {
        Pattern::parse(text).ok_or_else(|| format!("{text:?} in matchImages can match no image"))
    };
    let images = entry.match_images.iter().map(pattern);
    let default_cache =
        duration(&entry.default_cache_duration).map_err(|why| format!("defaultCacheDuration: {why}"))?;
    let env = entry.env.unwrap_or_default().into_iter();
    let service_account = entry.token_attributes.map(|token| {
        if entry.api_version != TOKEN_PLUGIN_VERSION {
            return Err(format!("it needs apiVersion {TOKEN_PLUGIN_VERSION}"));
        }
        parse_token(token)
    });
    let service_account = service_account
        .transpose()
        .map_err(|why| format!("tokenAttributes: {why}"))?;
    Ok(Provider {
        name: entry.name,
        api_version: entry.api_version,
        default_cache,
        args: entry.args.unwrap_or_default(),
        env: env.map(|variable| (variable.name, variable.value)).collect(),
        service_account,
        images: images.collect::<Result<_, _>>()?,
    })
}

/// The rules of kubelet's `validateCredentialProviderConfig`.
fn parse_token(entry: TokenEntry) -> Result<TokenAttributes, String> {
    let audience = entry.service_account_token_audience.unwrap_or_default();
    if audience.is_empty() {
        return Err("serviceAccountTokenAudience is empty".to_owned());
    }
    let cache_type = match entry.cache_type.as_deref() {
        Some("ServiceAccount") => TokenCacheType::ServiceAccount,
        Some("Token") => TokenCacheType::Token,
        _ => return Err("cacheType is not ServiceAccount or Token".to_owned()),
    };
    let is_required = entry
        .require_service_account
        .ok_or_else(|| "requireServiceAccount is missing".to_owned())?;
    let required = entry.required_service_account_annotation_keys.unwrap_or_default();
    let optional = entry.optional_service_account_annotation_keys.unwrap_or_default();
    if !is_required && !required.is_empty() {
        return Err("requiredServiceAccountAnnotationKeys need requireServiceAccount: true".to_owned());
    }
    let mut seen = BTreeSet::new();
    for key in required.iter().chain(&optional) {
        // Letters of any case are allowed before the slash, too.
        if let Some(why) = qualified_name_errors(&key.to_lowercase()).first() {
            return Err(format!("annotation key {key:?}: {why}"));
        }
        if !seen.insert(key) {
            return Err(format!("annotation key {key:?} is there twice"));
        }
    }
    Ok(TokenAttributes {
        audience,
        cache_type,
        is_required,
        required_annotations: required,
        optional_annotations: optional,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn config(provider: &str) -> String {
        format!(
            "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n- {provider}\n"
        )
    }

    const PROVIDER: &str = "{name: ecr, matchImages: ['*.dkr.ecr.*.amazonaws.com'], defaultCacheDuration: 12h, \
                            apiVersion: credentialprovider.kubelet.k8s.io/v1";

    #[test]
    fn configuration_of_kubelet_is_read() {
        let rest = "args: [get], env: [{name: A, value: b}], tokenAttributes: {serviceAccountTokenAudience: a, \
                    cacheType: Token, requireServiceAccount: true}}";
        let [provider] = <[_; 1]>::try_from(parse(&config(&format!("{PROVIDER}, {rest}"))).unwrap()).unwrap();
        assert_eq!(provider.name, "ecr");
        assert_eq!(provider.default_cache, Duration::from_secs(12 * 3600));
        assert_eq!(provider.args, ["get"]);
        assert_eq!(provider.env, [("A".to_owned(), "b".to_owned())]);
        let token = TokenAttributes {
            audience: "a".to_owned(),
            cache_type: TokenCacheType::Token,
            is_required: true,
            required_annotations: Vec::new(),
            optional_annotations: Vec::new(),
        };
        assert_eq!(provider.service_account, Some(token));
        assert!(provider.serves("1.dkr.ecr.eu-west-1.amazonaws.com/app"));
        assert!(!provider.serves("dkr.ecr.eu-west-1.amazonaws.com/app"));
    }

    #[test]
    fn what_kubelet_refuses_is_refused() {
        let valid = config(&format!("{PROVIDER}}}"));
        assert!(parse(&valid).is_ok());
        for (from, to, why) in [
            (
                "kubelet.config.k8s.io/v1\n",
                "kubelet.config.k8s.io/v9\n",
                "expected kubelet.config.k8s.io/v1",
            ),
            ("kind: Cred", "kind: Other", "expected kubelet.config.k8s.io/v1"),
            ("name: ecr", "name: ../ecr", "without a path"),
            ("name: ecr", "name: ''", "without a path"),
            ("name: ecr", "name: 'a b'", "without a path"),
            (
                "name: ecr",
                "label: ecr",
                "not a CredentialProviderConfig: a field at providers[0].label is unknown",
            ),
            ("name: ecr", "name: [", "it is not YAML (line"),
            (
                "kind: Cred",
                "---\nkind: Cred",
                "it is not one CredentialProviderConfig",
            ),
            ("kubelet.k8s.io/v1}", "kubelet.k8s.io/v2}", "apiVersion is"),
            ("12h", "-1h", "defaultCacheDuration"),
            ("'*.dkr.ecr.*.amazonaws.com'", "", "matchImages is empty"),
            ("'*.dkr.ecr.*.amazonaws.com'", "'a b'", "can match no image"),
        ] {
            assert!(valid.contains(from), "{from}");
            let text = parse(&valid.replacen(from, to, 1)).unwrap_err();
            assert!(text.contains(why), "{to}: {text}");
        }
        let twice = format!("{valid}- {PROVIDER}}}\n");
        assert!(parse(&twice).unwrap_err().contains("two of that name"));
        assert!(parse("").is_err());
        assert!(parse("[]").is_err());
        let why = parse(&valid.replace("v1}", "v1, env: [{name: A, value: [hidden]}]}")).unwrap_err();
        assert!(
            why.contains("providers[0].env[0].value") && !why.contains("hidden"),
            "{why}"
        );
    }

    const TOKEN: &str = "tokenAttributes: {serviceAccountTokenAudience: a, cacheType: ServiceAccount, \
                         requireServiceAccount: true, requiredServiceAccountAnnotationKeys: [Example.com/Role], \
                         optionalServiceAccountAnnotationKeys: [tenant]}";

    #[test]
    fn token_attributes_that_kubelet_refuses_are_refused() {
        let valid = config(&format!("{PROVIDER}, {TOKEN}}}"));
        let provider = parse(&valid).unwrap().remove(0);
        assert_eq!(
            provider.service_account.unwrap().cache_type,
            TokenCacheType::ServiceAccount
        );
        for (from, to, why) in [
            (
                "TokenAudience: a,",
                "TokenAudience: '',",
                "serviceAccountTokenAudience is empty",
            ),
            (
                "serviceAccountTokenAudience: a,",
                "",
                "serviceAccountTokenAudience is empty",
            ),
            (
                "cacheType: ServiceAccount,",
                "",
                "cacheType is not ServiceAccount or Token",
            ),
            (
                "cacheType: ServiceAccount",
                "cacheType: token",
                "cacheType is not ServiceAccount or Token",
            ),
            (
                "requireServiceAccount: true,",
                "",
                "requireServiceAccount is missing",
            ),
            (
                "requireServiceAccount: true",
                "requireServiceAccount: false",
                "need requireServiceAccount: true",
            ),
            ("[tenant]", "[Example.com/Role]", "is there twice"),
            ("[tenant]", "[tenant, tenant]", "is there twice"),
            ("[tenant]", "['a b']", "annotation key \"a b\": name part"),
            ("[tenant]", "[a/b/c]", "annotation key \"a/b/c\""),
            (
                "[tenant]}",
                "[tenant], other: 1}",
                "a field at providers[0].tokenAttributes.other is unknown",
            ),
            (
                "credentialprovider.kubelet.k8s.io/v1,",
                "credentialprovider.kubelet.k8s.io/v1beta1,",
                "tokenAttributes: it needs apiVersion credentialprovider.kubelet.k8s.io/v1",
            ),
            (
                "kubelet.config.k8s.io/v1\n",
                "kubelet.config.k8s.io/v1beta1\n",
                "tokenAttributes need apiVersion kubelet.config.k8s.io/v1",
            ),
        ] {
            assert!(valid.contains(from), "{from}");
            let text = parse(&valid.replacen(from, to, 1)).unwrap_err();
            assert!(text.contains(why), "{to}: {text}");
        }
    }

    #[test]
    fn annotations_are_those_of_the_configured_keys() {
        let text = config(&format!("{PROVIDER}, {TOKEN}}}"));
        let token = parse(&text).unwrap().remove(0).service_account.unwrap();
        let map = |entries: &[(&str, &str)]| -> BTreeMap<String, String> {
            let entries = entries.iter();
            entries
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect()
        };
        let (role, tenant, other) = (("Example.com/Role", "r"), ("tenant", "t"), ("other", "o"));
        let selected = |entries: &[(&str, &str)]| {
            let selected = token.select_annotations(&map(entries));
            selected.map_err(str::to_owned)
        };
        assert_eq!(selected(&[role, tenant, other]), Ok(map(&[role, tenant])));
        assert_eq!(selected(&[role, other]), Ok(map(&[role])));
        assert_eq!(selected(&[tenant]), Err("Example.com/Role".to_owned()));
    }
}
