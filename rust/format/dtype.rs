//! Element types: what safetensors and numpy / `ml_dtypes` call them, and how wide they are.

use crate::{Error, Result};

macro_rules! dtypes {
    ($($variant:ident $name:literal $numpy:literal $bits:literal,)*) => {
        /// An element type; little-endian where it has more than one byte.
        #[allow(non_camel_case_types, clippy::upper_case_acronyms, missing_docs)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum DType { $($variant,)* }

        impl DType {
            /// All of them.
            pub const ALL: &'static [DType] = &[$(DType::$variant,)*];

            /// The safetensors name.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// The numpy / `ml_dtypes` name.
            pub const fn numpy(self) -> &'static str {
                match self { $(Self::$variant => $numpy,)* }
            }

            /// Bits of one element.
            pub const fn bits(self) -> u64 {
                match self { $(Self::$variant => $bits,)* }
            }
        }
    };
}

dtypes! {
    BOOL "BOOL" "bool" 8,
    U8 "U8" "uint8" 8,
    I8 "I8" "int8" 8,
    F4 "F4" "float4_e2m1fn" 4,
    F6_E2M3 "F6_E2M3" "float6_e2m3fn" 6,
    F6_E3M2 "F6_E3M2" "float6_e3m2fn" 6,
    F8_E5M2 "F8_E5M2" "float8_e5m2" 8,
    F8_E4M3 "F8_E4M3" "float8_e4m3fn" 8,
    F8_E8M0 "F8_E8M0" "float8_e8m0fnu" 8,
    F8_E4M3FNUZ "F8_E4M3FNUZ" "float8_e4m3fnuz" 8,
    F8_E5M2FNUZ "F8_E5M2FNUZ" "float8_e5m2fnuz" 8,
    I16 "I16" "int16" 16,
    U16 "U16" "uint16" 16,
    F16 "F16" "float16" 16,
    BF16 "BF16" "bfloat16" 16,
    I32 "I32" "int32" 32,
    U32 "U32" "uint32" 32,
    F32 "F32" "float32" 32,
    I64 "I64" "int64" 64,
    U64 "U64" "uint64" 64,
    F64 "F64" "float64" 64,
    C64 "C64" "complex64" 64,
}

impl DType {
    /// Looks a safetensors name up.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }

    /// Looks a numpy / `ml_dtypes` name up, of a type with whole bytes per element.
    ///
    /// The 4 and 6 bit types are left out: safetensors packs them and `ml_dtypes` does not, so their
    /// bytes would not be those that the name promises.
    pub fn from_numpy(name: &str) -> Result<Self> {
        let known = |dtype: &Self| dtype.item_size().is_some();
        Self::ALL
            .iter()
            .copied()
            .filter(known)
            .find(|dtype| dtype.numpy() == name)
            .ok_or_else(|| {
                let names: Vec<_> = Self::ALL
                    .iter()
                    .filter(|dtype| known(dtype))
                    .map(|dtype| dtype.numpy())
                    .collect();
                let allowed = names.join(", ");
                Error::invalid(
                    "dtype",
                    "",
                    format!("{name:?} is none of {allowed} (little-endian)"),
                )
            })
    }

    /// Bytes of one element, unless it has a fraction of a byte.
    pub const fn item_size(self) -> Option<u64> {
        if self.bits().is_multiple_of(8) {
            Some(self.bits() / 8)
        } else {
            None
        }
    }

    /// Whether it is an unsigned integer: these widen into one another.
    pub const fn is_unsigned(self) -> bool {
        matches!(self, Self::U8 | Self::U16 | Self::U32 | Self::U64)
    }

    /// Bytes of a tensor of this shape; none on overflow or a fraction of a byte.
    pub fn tensor_bytes(self, shape: &[u64]) -> Option<u64> {
        let items = shape
            .iter()
            .try_fold(1_u64, |product, dim| product.checked_mul(*dim))?;
        let bits = items.checked_mul(self.bits())?;
        (bits % 8 == 0).then_some(bits / 8)
    }
}
